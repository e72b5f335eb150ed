"""Folding by what a run shows: what folds by it alone, what stays and why, agreement with rules, checkpoints."""
import copy
import re
from collections import UserDict
from contextlib import suppress

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from mmunorm import UN, fuse_norms, replace_norms
from mmunorm.checkpoints.folded import load_folded, save_folded
from projects.low_light.low_light.iat import LightNorm2d

from ..versions import sees_slices
from . import models
from .blocks import BLOCKS, DIM, Block, Net

IMAGES = torch.randn(2, 3, 32, 32, dtype=torch.float64)


def vectors(tokens, seed=0, batch=2):
    return torch.randn(batch, tokens, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fold_net(names, pool='mean', gamma='some', seed=0):
    """Folds a network by one length of 6 tokens and one of 8, and compares it in these and in another."""
    torch.manual_seed(seed)
    model, examples = Net(names, pool), [vectors(tokens) for tokens in (6, 8, 7)]
    report = models.fold(model, *examples, gamma=gamma, seed=seed, example=[(x, ) for x in examples[:2]])
    assert [fold.norm for fold in report.kept] == model.kept == models.norms(model)
    return report


REASONS = {
    'post': 'its output is consumed by the norm norm',
    'padded_windows': 'its output is consumed by blocks.0.fc together with other values, such as padding',
    'token_after_norm': 'output is consumed by blocks.0.q together with other values|consumed by blocks.0.kv together',
    'padded': 'its output is consumed by blocks.0.conv2, a 3x3 convolution that pads with zeros',
    'part_read_elsewhere': 'its output is consumed by blocks.0.fc, which has a weight that is consumed by mean, too',
    'mixer': 'its output is consumed by blocks.0.fc along another dimension than its channels',
    'relu': 'its output is consumed by relu_',
    'source_read_elsewhere': 'its output is consumed by relu',
    'source_read_by_a_layer': 'its output is consumed by relu',
    'rounded': 'its output is consumed by long',
    'as_bits': 'its output is consumed by view',
    'two_readers': 'its output is consumed by blocks.0.fc, which also has another input',
    **dict.fromkeys(['overlapping_parts', 'called_in_two_ways', 'with_and_without_bias', 'shared_bias', 'in_place',
                     'bias_read_elsewhere', 'bias_of_source_read_elsewhere'],
                    'output( of blocks.0.[a-z0-9]+)? differs by .* of its largest value when it is folded'),
}


# Without it, such a norm is kept.
SLICED = {'overlapping_parts', 'other_part_read_elsewhere', 'part_read_elsewhere'}
USABLE = sorted(set(BLOCKS) - (set() if sees_slices() else SLICED))


@pytest.mark.parametrize('name', USABLE)
def test_block(name):
    kept = fold_net([name]).kept
    assert all(re.search(REASONS.get(name, '.'), fold.where) for fold in kept)


@settings(max_examples=15, phases=[Phase.generate], deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))
@given(names=st.lists(st.sampled_from(USABLE), max_size=4), pool=st.sampled_from(['mean', 'max', 'first', '']),
       gamma=st.sampled_from(['some', 'all', 'none']), seed=st.integers(0, 1000))
def test_random_networks(names, pool, gamma, seed):
    fold_net(names, pool, gamma, seed)


def test_where_norms_go():
    report = fold_net(['attention', 'res_post', 'torch_attention'])
    assert {fold.norm: fold.where for fold in report.folded} == {
        'embed_norm': 'back into embed', 'blocks.0.norm': 'blocks.0.qkv', 'blocks.0.q_norm': 'back into blocks.0.qkv',
        'blocks.0.k_norm': 'back into blocks.0.qkv', 'blocks.1.norm': 'back into blocks.1.fc2',
        'blocks.2.norm': 'blocks.2.attn', 'norm': 'head'}


def in_a_container(self, x):
    """In a container that nobody knows."""
    y = self.norm(x)
    return type('Result', (), dict(logits=self.fc(y), features={'last': y.transpose(0, 1)}))


def remembered(self, x):
    self.features = [self.norm(x)]
    return self.fc(self.features[0])


def scripted(self, x):
    y = self.norm(x)
    return self.fc(y) + self.part(y).mean()


def read_by_numpy(self, x):
    y = self.norm(x)
    return self.fc(y) + torch.from_numpy(y.numpy()).mean()


def padded_to_four(self, x):
    """Pads sequences to a multiple of four, and so not the example."""
    y, missing = self.norm(x), -x.shape[1] % 4
    return self.fc(F.pad(y, (0, 0, 0, missing)) if missing else y)


def padded_and_unread(self, x):
    F.pad(self.norm(x), (0, 0, 0, 0))
    return self.fc(x)


def unread(self, x):
    self.norm(x)
    return x + 1


def written_to(self, x):
    y = self.norm(x)
    y[:, :1] = 0
    return self.fc(y)


def layer_norm_of_its_weight(self, x):
    y = F.layer_norm(x + torch.arange(DIM), (DIM, ), self.norm.weight, self.norm.bias)
    return self.fc(self.norm(x)) + y.mean()


def branching(self, x):
    """Another way for long sequences."""
    y = self.norm(x)
    return self.fc(y) if x.shape[1] < 9 else self.fc(y.tanh())


class Raises(UN):

    def forward(self, x, pad_mask=None):
        raise ValueError


def caught(self, x):
    with suppress(ValueError):
        self.idle(x)
    return self.fc(self.norm(x)) + self.norm(x).exp().mean()


def joined_with_nothing(self, x):
    y = self.norm(x)
    return self.fc(torch.cat([y, y.new_zeros(len(x), -x.shape[1] % 8, DIM)], 1))[:, :x.shape[1]]


def kept_as_a_copy(self, x):
    y = self.norm(x)
    self.features = copy.deepcopy(y)
    return self.fc(y)


@pytest.mark.parametrize('compute, why', [
    (in_a_container, 'its output is an output of the model, or stored by it'),
    (remembered, 'its output is an output of the model, or stored by it'),
    (scripted, 'its output is consumed by aten::softplus, code that is no Python'),
    (read_by_numpy, 'its output is consumed by numpy'),
    (padded_to_four, 'its output is consumed by fc together with other values, such as padding'),
    (padded_and_unread, 'its output is padded by 0 at this input size'),
    (unread, 'its output is consumed by nothing'),
    (written_to, 'its output is consumed by __setitem__'),
    # Another number than 1 is possible at another input.
    (lambda self, x: self.fc(self.norm(x) * torch.ones_like(x)), 'its output is consumed by mul'),
    (layer_norm_of_its_weight, 'its weight or bias is consumed by layer_norm, too'),
    (lambda self, x: self.fc(self.norm(x)) * self.norm.bias.exp().sum(), 'its weight or bias is consumed by exp, too'),
    (lambda self, x: self.fc(self.norm(x)) + F.linear(x, self.other.weight, self.norm.bias).mean(),
     r'the model does not run on the example \(RuntimeError'),
    (lambda self, x: self.fc(F.dropout(self.norm(x), 0.5, training=True)),
     'its output is consumed by (native_)?dropout'),
    (branching, 'its output is consumed by tanh'), (caught, 'its output is consumed by exp'),
    (joined_with_nothing, 'its output is concatenated with an empty tensor'),
    (kept_as_a_copy, 'its output is consumed by __deepcopy__')])
def test_what_else_reads_a_norm(compute, why):
    parts = dict(norm=UN(DIM), fc=nn.Linear(DIM, 3), part=torch.jit.script(nn.Sequential(nn.Softplus())),
                 other=nn.Linear(DIM, DIM), idle=Raises(DIM))
    kept = fuse_norms(models.randomize(Block(compute, parts)), example=torch.zeros(1, 8, DIM)).kept
    assert [fold.norm for fold in kept] == ['norm', 'idle'] and re.match(why, kept[0].where)
    assert kept[1].where == 'did not run on the example'


def test_what_is_garbage_is_not_kept_by_the_model():
    def compute(self, x):
        cycle = [self.norm(x)]
        cycle.append(cycle)  # reference counts alone would not free it
        return self.fc(cycle[0])

    model = Block(compute, dict(norm=UN(DIM), fc=nn.Linear(DIM, 3)))
    fuse_norms(models.randomize(model), strict=True, example=torch.zeros(1, 8, DIM))


@pytest.mark.parametrize('always', [False, True])
def test_padding_at_other_sizes_is_found(always):
    def compute(self, x):
        y = self.norm(self.conv(x).relu().permute(0, 2, 3, 1))
        below = -y.shape[1] % 4
        if below or always:
            y = F.pad(y, (0, 0, 0, 0, 0, below))
        return self.fc(y).mean((1, 2))

    model = Block(compute, dict(conv=nn.Conv2d(3, DIM, 4, 4), norm=UN(DIM), fc=nn.Linear(DIM, 3)))
    fold, = fuse_norms(models.randomize(model), example=torch.randn(1, 3, 32, 32)).kept
    assert re.search('padded by 0 at this input size|together with other values, such as padding', fold.where)


@pytest.mark.parametrize('example, error, match', [
    ('image', TypeError, 'example: must be a tensor, .* got str'),
    *((wrong, TypeError, 'example: must be a tensor, .* a function that takes the model')
      for wrong in (nn.Linear(2, 2), int, 3)),
    ([], TypeError, 'example: the list is empty'),
    (torch.randn(2, 3, 4), RuntimeError, 'example: the model does not run on it: RuntimeError: mat1')])
def test_bad_examples(example, error, match):
    with pytest.raises(error, match=match):
        fuse_norms(models.randomize(Net(['pre'])), example=example)


def test_an_example_of_keywords_in_bfloat16():
    model = models.randomize(Net(['pre', 'res_post', 'attention']).bfloat16(), gamma='none')
    x = vectors(6).bfloat16()
    before = models.outputs(model, x)
    assert len(fuse_norms(model, strict=True, example=UserDict(x=x)).folded) == 7
    models.assert_equal(models.outputs(model, x), before, 0.1)


@pytest.mark.parametrize('others, why', [
    ([nn.Conv2d(4, 2, 1)], ''),
    ([nn.Conv2d(4, 2, 1, groups=2)], 'it mixes channels, which cannot be folded into its neighbor 1'),
    ([Block(lambda self, x: x.flip(1), {}), nn.Conv2d(4, 2, 1)],
     'it mixes channels, which cannot be folded into its neighbor 2'),
    ([nn.ReLU(), nn.Conv2d(4, 2, 1)], 'it mixes channels, which cannot be folded into its neighbor before')])
def test_a_norm_that_mixes_channels(others, why):
    model = nn.Sequential(LightNorm2d(4), *others)
    if 'before' in why:
        model.insert(0, nn.Conv2d(4, 4, 1))
    nn.init.normal_(next(module for module in model if isinstance(module, LightNorm2d)).matrix)
    report = fold_by_graph(model, torch.randn(2, 4, 3, 3, dtype=torch.float64))
    assert [fold.where for fold in report.folded + report.kept] == [why.replace('before', '0') or '1']


VIT = dict(img_size=32, embed_dim=16, depth=2, num_heads=2, patch_size=8)
# Arguments and the number of norms; what stays, by the end of its name.
TIMM = {
    'swinv2_tiny_window8_256': (dict(img_size=32, embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=4), 11, ()),
    'eva02_tiny_patch14_224': (VIT, 5, ()),
    'cait_xxs24_224': (VIT, 9, ()),
    'convnext_atto': (dict(depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)), 9, ()),
    'xcit_nano_12_p16_224': (dict(img_size=32, embed_dim=16, depth=1, num_heads=2), 13,
                             ('norm3', 'bn', 'attn_blocks.0.norm1', 'attn_blocks.0.norm2', 'attn_blocks.1.norm1',
                              'attn_blocks.1.norm2')),
    'twins_svt_small': (dict(embed_dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)), 13,
                        ('0.0.norm1', '1.0.norm1', '2.0.norm1', '3.0.norm1')),
}


def timm_model(name, **kwargs):
    return replace_norms(timm.create_model(name, num_classes=5, **kwargs), dict(type='UN')).eval()


def fold_by_graph(model, x=IMAGES):
    return models.fold(model, x, example=x)


@pytest.mark.parametrize('name', TIMM)
def test_timm(name, tmp_path):
    """Folds and comes back from its checkpoint."""
    kwargs, count, kept = TIMM[name]
    model = timm_model(name, **kwargs)
    report = fold_by_graph(model)
    assert len(report.folded) + len(report.kept) == count and len(report.kept) >= len(kept)
    assert all(fold.norm.endswith(kept) for fold in report.kept)

    save_folded(model.float(), tmp_path / 'folded.pth', report=report)
    loaded = load_folded(tmp_path / 'folded.pth', timm_model(name, **kwargs))
    assert models.norms(loaded) == [fold.norm for fold in report.kept]
    models.assert_equal(*(models.outputs(net, IMAGES.float()) for net in (loaded, model)), 0)


def test_torch_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    report = fold_by_graph(replace_norms(model, dict(type='UN')), torch.randn(2, 5, 8, dtype=torch.float64))
    assert [fold.norm for fold in report.kept] == ['norm'] and len(report.folded) == 4


@pytest.mark.parametrize('backbone, neck', [
    (dict(type='ConvNeXt', arch=dict(depths=[1] * 4, channels=[8, 8, 8, 16])), False),
    (dict(type='ConvNeXt', arch=dict(depths=[1] * 4, channels=[8, 8, 8, 16]), linear_pw_conv=False), False),
    (dict(type='SwinTransformerV2', img_size=32, window_size=4, out_indices=(1, ),
          arch=dict(embed_dims=8, depths=[1, 1], num_heads=[1, 2], extra_norm_every_n_blocks=0)), True),
], ids=['convnext', 'convnext_of_convolutions', 'swin_v2'])
def test_mmpretrain(backbone, neck):
    model = replace_norms(models.classifier(backbone, 16, neck=neck), dict(type='UN'))
    report = fold_by_graph(model)
    assert report.folded and not report.kept, report
