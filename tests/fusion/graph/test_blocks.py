"""What folds by the graph alone, what stays and why; and that a folded network computes the same."""
import copy
import re

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from mmunorm import UN, fuse_norms
from mmunorm.enhancement.iat import LightNorm2d
from mmunorm.fusion import NotFoldedError

from .. import models
from .blocks import BLOCKS, DIM, Block, Net


def vectors(tokens, seed=0, batch=2):
    return torch.randn(batch, tokens, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(names, pool='mean', gamma='some', seed=0):
    """Folds a network by one length of 6 tokens and one of 8, and compares it in these and in another."""
    torch.manual_seed(seed)
    model = models.randomize(Net(names, pool).double(), seed, gamma)
    examples = [vectors(tokens) for tokens in (6, 8, 7)]
    before = [models.outputs(model, x) for x in examples]
    report = fuse_norms(model, example=[(x, ) for x in examples[:2]])
    for x, expected in zip(examples, before, strict=True):
        models.assert_equal(models.outputs(model, x), expected)
    assert [fold.norm for fold in report.kept] == model.kept == models.norms(model)
    return report


REASONS = {
    'post': 'its output is read by the norm norm; its input is not that of linear layers alone',
    'padded_windows': 'its output is read by blocks.0.fc together with other values, such as padding',
    'token_after_norm': 'its output is read by blocks.0.q together with other values|read by blocks.0.kv together',
    'padded': 'its output is read by blocks.0.conv2, a 3x3 convolution that pads with zeros',
    'part_read_elsewhere': 'its output is read by blocks.0.fc, which has a weight that is read by mean, too',
    'overlapping_parts': 'read by blocks.0.fc, which has a weight of which another layer uses some rows, too',
    'mixer': 'its output is read by blocks.0.fc along another dimension than its channels',
    'in_place': 'its output is read after its input has been changed in place',
    'relu': 'its output is read by relu_',
    'two_readers': 'its output is read by blocks.0.fc, which reads something else, too',
}


@pytest.mark.parametrize('name', BLOCKS)
def test_block(name):
    kept = check([name]).kept
    assert all(re.search(REASONS.get(name, '.'), fold.where) for fold in kept)


@settings(max_examples=15, phases=[Phase.generate], deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))
@given(names=st.lists(st.sampled_from(sorted(BLOCKS)), max_size=4), pool=st.sampled_from(['mean', 'max', 'first', '']),
       gamma=st.sampled_from(['some', 'all', 'none']), seed=st.integers(0, 1000))
def test_random_networks(names, pool, gamma, seed):
    check(names, pool, gamma, seed)


def test_where_norms_go():
    report = check(['attention', 'res_post', 'torch_attention'])
    assert {fold.norm: fold.where for fold in report.folded} == {
        'embed_norm': 'back into embed', 'blocks.0.norm': 'blocks.0.qkv', 'blocks.0.q_norm': 'back into blocks.0.qkv',
        'blocks.0.k_norm': 'back into blocks.0.qkv', 'blocks.1.norm': 'back into blocks.1.fc2',
        'blocks.2.norm': 'blocks.2.attn', 'norm': 'head'}


def test_without_an_example_nothing_is_looked_at():
    report = fuse_norms(models.randomize(Net(['pre'])))
    assert not report.folded and {fold.where for fold in report.kept} == {'no fold rule covers its place'}


def count(module, args):
    module.calls += 1


def test_the_model_is_left_alone():
    """A norm that stays leaves a strict call without a trace; the copy alone has run."""
    model = models.randomize(Net(['post', 'pre']))
    model.register_buffer('calls', torch.zeros(()))
    model.register_forward_pre_hook(count)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(NotFoldedError, match='blocks.0.norm .UN.: its output is read by the norm blocks.1.norm'):
        fuse_norms(model, strict=True, example=vectors(6).float())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any('forward' in vars(module) for module in model.modules())


def given_away(self, x):
    """In a container that nobody knows."""
    y = self.norm(x)
    return type('Result', (), dict(logits=self.fc(y), features={'last': y.transpose(0, 1)}))


def remembered(self, x):
    self.features = [self.norm(x)]
    return self.fc(self.features[0])


def scripted(self, x):
    y = self.norm(x)
    return self.fc(y) + self.part(y).mean()


def left_to_numpy(self, x):
    y = self.norm(x)
    return self.fc(y) + torch.from_numpy(y.numpy()).mean()


def padded_to_four(self, x):
    """Pads sequences to a multiple of four, and so not the example."""
    y, missing = self.norm(x), -x.shape[1] % 4
    return self.fc(nn.functional.pad(y, (0, 0, 0, missing)) if missing else y)


def unread(self, x):
    self.norm(x)
    return x + 1


@pytest.mark.parametrize('compute, why', [
    (given_away, 'its output is an output of the model, or kept by it'),
    (remembered, 'its output is an output of the model, or kept by it'),
    (scripted, 'its output is read by softplus'),
    (left_to_numpy, 'its output is read by numpy'),
    (padded_to_four, 'its output is read by fc together with other values, such as padding'),
    (unread, 'its output is read by nothing; its input is not that of linear layers alone')])
def test_what_else_reads_a_norm(compute, why):
    parts = dict(norm=UN(DIM), fc=nn.Linear(DIM, 3), part=torch.jit.script(nn.Sequential(nn.Softplus())), idle=UN(DIM))
    kept = fuse_norms(models.randomize(Block(compute, parts)), example=torch.zeros(1, 8, DIM)).kept
    assert [fold.norm for fold in kept] == ['norm', 'idle'] and kept[0].where.startswith(why)
    assert kept[1].where == 'did not run on the example'


@pytest.mark.parametrize('always', [False, True])
def test_padding_at_other_sizes_is_found(always):
    def compute(self, x):
        y = self.norm(self.conv(x).relu().permute(0, 2, 3, 1))
        below = -y.shape[1] % 4
        if below or always:
            y = nn.functional.pad(y, (0, 0, 0, 0, 0, below))
        return self.fc(y).mean((1, 2))

    model = Block(compute, dict(conv=nn.Conv2d(3, DIM, 4, 4), norm=UN(DIM), fc=nn.Linear(DIM, 3)))
    fold, = fuse_norms(models.randomize(model), example=torch.randn(1, 3, 32, 32)).kept
    assert re.search('padded by nothing at this input size|together with other values, such as padding', fold.where)


@pytest.mark.parametrize('example, error, match', [
    ('picture', TypeError, 'example: must be a tensor, .* got str'),
    ([], TypeError, 'example: the list is empty'),
    (torch.randn(2, 3, 4), RuntimeError, 'example: the model does not run on it: RuntimeError: mat1')])
def test_bad_examples(example, error, match):
    with pytest.raises(error, match=match):
        fuse_norms(models.randomize(Net(['pre'])), example=example)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_other_dtypes_and_keywords(dtype, tolerance):
    model = models.randomize(Net(['pre', 'res_post', 'attention']).to(dtype), gamma='none')
    x = vectors(6).to(dtype)
    before = models.outputs(model, x)
    assert len(fuse_norms(model, strict=True, example=dict(x=x)).folded) == 7
    models.assert_equal(models.outputs(model, x), before, tolerance)


def test_a_norm_that_mixes_channels_stays():
    model = nn.Sequential(LightNorm2d(4), nn.Conv2d(4, 2, 1)).double().eval()
    report = fuse_norms(model, example=torch.zeros(1, 4, 3, 3, dtype=torch.float64))
    assert report.kept[0].where == 'it mixes channels, which only rules fold'
