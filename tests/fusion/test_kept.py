"""What must not be folded stays, with the reason; `strict` makes it an error before anything changes."""
import re

import pytest
import torch
from mmcv.cnn import ConvModule
from mmpretrain.models.backbones.swin_transformer import SwinBlock
from mmpretrain.models.utils import ShiftWindowMSA
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils import parametrizations, prune
from torchvision.ops import FrozenBatchNorm2d

from mmunorm import UN, UN2d, fuse_norms
from mmunorm.fusion import FoldedNorm, NotFoldedError
from mmunorm.norms.layers import is_norm

from ..versions import needs_rms_norm
from . import models
from .blocks import Block

X = torch.randn(2, 6, 9, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
TOKENS = X.movedim(1, -1)
BLOCK = 'backbone.stages.0.blocks.1'


def pair_of(norm, reader):
    """A norm and its reader."""
    return Block(lambda self, x: self.reader(self.norm(x)), dict(norm=norm, reader=reader))


def why_kept(model, x=X):
    """The codes of the obstacle and of what is behind it."""
    report = models.fold(model, x, example=x)
    assert not report.folded and sum(map(is_norm, model.modules())) == 1
    kept, = report.kept
    return codes(kept.obstacle)


def codes(obstacle):
    return f'{obstacle.code}/{codes(obstacle.cause)}' if obstacle.cause else obstacle.code


@pytest.mark.parametrize('norm, reader, x, where', [
    (nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3, bias=False), X, 'reader'),
    (nn.BatchNorm2d(6, affine=False), nn.Conv2d(6, 4, 3, stride=2, groups=2, dilation=2), X, 'reader'),
    (nn.SyncBatchNorm(6), nn.Conv2d(6, 6, 1, groups=6), X, 'reader'),
    (UN2d(6), nn.Conv2d(6, 4, 3, padding=1, padding_mode='reflect'), X, 'reader'),
    (FrozenBatchNorm2d(6), nn.Conv2d(6, 4, 1, padding='same'), X, 'reader'),
    (UN2d(6), nn.Conv2d(6, 4, 3, padding='valid'), X, 'reader'),
    (UN(6), nn.Linear(6, 3), TOKENS, 'reader'),
    (nn.BatchNorm1d(6), nn.Conv1d(6, 3, 2), X[..., 0], 'reader'),
    (nn.BatchNorm3d(6), nn.Conv3d(6, 3, 1), X[..., None], 'reader'),
    (nn.BatchNorm2d(6), ConvModule(6, 3, 1), X, 'reader.conv'),
], ids=lambda value: str(value) if isinstance(value, nn.Module) else '')
def test_readers(norm, reader, x, where):
    assert models.fold(pair_of(norm, reader), x, strict=True, example=x).folded[0].where == where


class Quantized(torch.Tensor):
    """A weight that is not a plain tensor, such as torchao's."""

    def __deepcopy__(self, memo):
        return nn.Parameter(self.detach().clone())


def quantized():
    layer = nn.Conv2d(6, 3, 1).double()
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized))
    return layer


def conv(*args, **kwargs):
    return nn.Conv2d(6, 3, *args, **kwargs)


# From the release with RMSNorm on, a parameter of another class runs in a trace.
@pytest.mark.parametrize('norm, reader, why', [
    (nn.LayerNorm((9, 9)), nn.Linear(9, 3), 'class'),
    (nn.GroupNorm(2, 6), conv(1), 'online'), (nn.InstanceNorm2d(6, affine=True), conv(1), 'online'),
    (nn.BatchNorm2d(6, track_running_stats=False), conv(1), 'class'),
    (BatchNormAct2d(6), conv(1), 'class'),
    (nn.BatchNorm2d(6), conv(3, padding=1), 'used/padded convolution'),
    (nn.BatchNorm2d(6), conv((1, 3), padding='same'), 'used/padded convolution'),
    (nn.BatchNorm2d(6), ConvModule(6, 3, 3, padding=1, act_cfg=None), 'used/padded convolution'),
    (nn.BatchNorm2d(6), nn.Sequential(nn.AvgPool2d(3, padding=1), conv(1)), 'used/function'),
    (nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 3, 1), 'used/function'),
    (nn.BatchNorm2d(6), ConvModule(6, 3, 3, padding=1, padding_mode='reflect', order=('act', 'conv', 'norm')),
     'used/function'),
    (nn.BatchNorm2d(6), nn.Linear(9, 3), 'used/dimension'),
    (nn.BatchNorm2d(6), parametrizations.weight_norm(conv(1)), 'used/computed weight'),
    (nn.BatchNorm2d(6), torch.nn.utils.weight_norm(conv(1)), 'used/computed weight'),
    (nn.BatchNorm2d(6), prune.random_unstructured(conv(1), 'weight', 0.5), 'used/computed weight'),
    pytest.param(nn.BatchNorm2d(6), quantized(), 'weight type', marks=needs_rms_norm),
    (UN(9), Block(lambda self, x: nn.functional.linear(x, self.weight),
                  dict(weight=nn.Parameter(torch.randn(3, 9)))), 'differs'),
], ids=lambda value: '' if isinstance(value, str) else type(value).__name__)
@pytest.mark.filterwarnings('ignore:.*weight_norm.*')
def test_reasons(norm, reader, why):
    assert why_kept(pair_of(norm, reader)) == why


@pytest.mark.parametrize('norm, name, value', [
    (UN(6), 'weight', float('nan')), (UN(6), 'bias', float('inf')), (UN(6), 'running_var', -1.),
    (UN(6, centered=True), 'running_mean', float('inf'))])
def test_statistics_that_are_not_finite(norm, name, value):
    model = pair_of(norm, nn.Linear(6, 3)).eval()
    getattr(model.norm, name).data[2] = value
    before = model.reader.weight.clone()
    assert fuse_norms(model, example=torch.randn(4, 6)).kept[0].where == 'its scale or shift is not finite'
    assert torch.equal(model.reader.weight, before)


class OtherFormula(UN):
    """Another one than its `affine()` has."""

    def forward(self, x, pad_mask=None):
        return 1.001 * super().forward(x, pad_mask)


@pytest.mark.parametrize('is_first', [True, False])
def test_a_norm_with_another_formula(is_first):
    norm = OtherFormula(6)
    assert why_kept(pair_of(norm, nn.Linear(6, 3)) if is_first else pair_of(nn.Linear(6, 6), norm), TOKENS) == 'differs'


def test_what_a_norm_with_another_formula_reads():
    model = Block(lambda self, x: self.fc(self.norm(x)) + self.other(self.norm(x)),
                  dict(norm=UN(6), fc=nn.Linear(6, 6), other=OtherFormula(6)))
    report = models.fold(model, TOKENS, example=TOKENS)
    assert not report.folded and report.kept[0].where.startswith('its output is consumed by the norm other')


@pytest.mark.parametrize('part, register', [
    ('norm', 'register_forward_hook'), ('reader', 'register_forward_pre_hook')])
def test_hooks(part, register):
    model = pair_of(nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1))
    handle = getattr(getattr(model, part), register)(lambda *args: None)
    assert why_kept(model).endswith('hooks')
    handle.remove()
    models.fold(model, X, strict=True, example=X)


@pytest.mark.parametrize('name, norm, how', [
    (f'{BLOCK}.attn', 'norm1', 'hook'), (f'{BLOCK}.attn.w_msa', 'norm1', 'forward'), ('neck', '', 'hook')])
def test_what_changes_the_values_between_a_norm_and_its_reader(name, norm, how):
    """A hook, or a forward of the instance, that squares what passes: it would see other values."""
    model = models.one_stage_swin()
    part = model.get_submodule(name)
    stock = part.forward

    def square(module, args):
        first = args[0]
        return (tuple(value**2 for value in first) if isinstance(first, tuple) else first**2, *args[1:])

    if how == 'hook':
        part.register_forward_pre_hook(square)
    else:
        part.forward = lambda *args, **kwargs: stock(*square(part, args), **kwargs)
    kept = [f'{BLOCK}.{norm}' if norm else 'backbone.norm0']
    report = models.assert_folds(model, (37, 45), kept=kept)
    if how == 'hook':
        assert report.kept[0].where.startswith('its output is consumed by pow')


def test_hooks_elsewhere_do_not_matter():
    model, calls = models.one_stage_swin(), []
    for name in (BLOCK, 'backbone.stages.0', ''):
        model.get_submodule(name).register_forward_hook(lambda *args: calls.append(args))
    models.assert_folds(model, (37, 45), count=6)
    assert calls


def share(path):
    """Changes two pairs so that both hold what `path` names of the first."""
    owner, _, name = path.rpartition('.')

    def change(first, second):
        setattr(second.get_submodule(owner), name, getattr(first.get_submodule(owner), name))

    return change


def overlap(first, second):
    # Every other row of the first; the second begins where the first, if contiguous, would have ended.
    memory = torch.randn(12, 12, dtype=torch.float64)
    first.double().reader.weight = nn.Parameter(memory[::2, :6])
    second.double().reader.weight = nn.Parameter(memory[4:10, 3:9])


def tie_to_an_embedding(first, second):
    for pair in (first, second):
        pair.table = nn.Embedding(6, 6)
        pair.table.weight = pair.reader.weight


def alias_in_a_buffer(first, second):
    for pair in (first, second):
        pair.register_buffer('alias', pair.double().reader.weight.detach().t())


@pytest.mark.parametrize('change', [
    share('norm'), share('norm.weight'), share('reader'), share('reader.weight'), share('reader.bias'), overlap,
    tie_to_an_embedding, alias_in_a_buffer, None])
def test_shared_modules_and_parameters_stay(change):
    first, second = (pair_of(UN(6), nn.Linear(6, 6)) for _ in range(2))
    if change:
        change(first, second)
    report = models.fold(nn.Sequential(first, second if change else first), TOKENS, example=TOKENS)
    why = 'is shared with|also has another input|has a bias that|shares its bias|another layer uses some rows'
    assert not report.folded and all(re.search(why, kept.where) for kept in report.kept)


def test_layers_that_lie_side_by_side_in_memory_and_sparse_buffers_share_nothing():
    model = nn.Sequential(pair_of(UN(6), nn.Linear(6, 6)), pair_of(UN(6), nn.Linear(6, 6))).double()
    for pair, part in zip(model, torch.randn(2, 6, 6, dtype=torch.float64), strict=True):
        pair.reader.weight = nn.Parameter(part)
    model.register_buffer('adjacency', torch.eye(6).to_sparse())
    models.fold(model, TOKENS, strict=True, example=TOKENS)


class OtherForward(SwinBlock):
    def forward(self, x, hw_shape):
        return x + self.attn(self.norm1(x).tanh(), hw_shape) + self.ffn(self.norm2(x) ** 2, identity=x)


class OtherMask(ShiftWindowMSA):
    """What it does with its mask is not known, nor whether filled padding would do."""

    @staticmethod
    def get_attn_mask(hw_shape, window_size, shift_size, device=None):
        return None


@pytest.mark.parametrize('name, cls, norms', [
    (BLOCK, OtherForward, {f'{BLOCK}.norm1': 'tanh', f'{BLOCK}.norm2': 'pow'}),
    (f'{BLOCK}.attn', OtherMask, {f'{BLOCK}.norm1': 'padd'}),
])
def test_subclasses(name, cls, norms):
    model = models.one_stage_swin()
    model.get_submodule(name).__class__ = cls
    for fold in models.assert_folds(model, (37, 45), kept=norms).kept:
        assert re.search(norms[fold.norm], fold.where), fold.where


def test_strict_lists_all_and_changes_nothing():
    model = models.randomize(models.detector(add_extra_convs='on_input'))
    model.backbone.stages[0].blocks[0].norm1 = nn.LayerNorm(8).eval()
    model.register_buffer('calls', torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.calls.add_(1))  # the copy alone runs
    model.backbone.stages[0].blocks[1].attn.w_msa.qkv.register_forward_hook(lambda *args: None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    with pytest.raises(NotFoldedError, match='3 norms cannot be folded') as error:
        fuse_norms(model, strict=True)
    for name, why in [('backbone.norm1 (UN)', 'pads with zeros'),
                      ('backbone.stages.0.blocks.0.norm1 (LayerNorm)', 'computes its statistics at inference'),
                      ('backbone.stages.0.blocks.1.norm1 (UN)', 'has forward hooks')]:
        line, = (line for line in str(error.value).splitlines() if name in line)
        assert why in line
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert classes == [type(module) for module in model.modules()]


@pytest.mark.parametrize('part', ['', 'backbone.stages.1'])
def test_training_mode_is_an_error(part):
    model = models.swin_classifier().eval()
    model.get_submodule(part).train()
    with pytest.raises(ValueError, match=f'model: {part or "it"} is in training mode; call model.eval'):
        fuse_norms(model)


@pytest.mark.parametrize('shift', [0., 1.])
def test_a_layer_without_bias_before_a_norm_gets_one_where_the_norm_shifts(shift):
    model = nn.Sequential(nn.Linear(6, 4, bias=False), UN(4), nn.GELU()).double()
    nn.init.constant_(model[1].bias, shift)
    x = model.eval()(TOKENS)
    fold, = fuse_norms(model, example=TOKENS).folded
    assert fold.where == 'back into 0' and (model[0].bias is None) == (shift == 0)
    models.assert_equal([model(TOKENS)], [x])


def test_a_model_without_norms_and_a_bare_norm():
    report = fuse_norms(nn.Linear(2, 2).eval(), strict=True)
    assert report.folded == report.kept == () and str(report).startswith('no norm to fold: its norms are')
    assert fuse_norms(UN(4).eval()).kept[0].where.startswith('no fold rule can run UN')


def test_a_folded_norm_takes_what_a_norm_takes():
    x = torch.randn(2, 3, 4)
    assert FoldedNorm()(x, pad_mask=torch.zeros(2, 3, dtype=torch.bool)) is x
