"""What must not be folded stays, with the reason; `strict` makes it an error before anything changes."""

import copy

import pytest
import torch
from mmcv.cnn import ConvModule
from mmpretrain.models.backbones.swin_transformer import SwinBlock
from mmpretrain.models.heads import LinearClsHead
from mmpretrain.models.utils import ShiftWindowMSA, WindowMSA
from torch import nn
from torch.nn.utils import parametrizations, prune
from torchvision.ops import FrozenBatchNorm2d

from mmunorm import UN, UN2d, fuse_norms
from mmunorm.fusion import FoldedNorm, Into, NotFoldedError, fold_rule
from mmunorm.norms.layers import is_norm

from ..versions import needs_rms_norm
from . import models

X = torch.randn(2, 6, 9, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Pair(nn.Module):
    """A norm and its reader, with a rule."""

    def __init__(self, norm, reader):
        super().__init__()
        self.norm, self.reader = norm, reader

    def forward(self, x):
        return self.reader(self.norm(x))


@fold_rule(Pair)
def pair_rule(pair):
    yield Into('norm', 'reader')


def fold(model, x=X, strict=False):
    """Folds in float64, and compares the outputs."""
    models.randomize(model.double())
    before = models.outputs(model, x.double())
    report = fuse_norms(model, strict=strict)
    models.assert_equal(models.outputs(model, x.double()), before)
    return report


def why_kept(model, x=X):
    report = fold(model, x)
    assert not report.folded and len(report.kept) == 1
    assert sum(map(is_norm, model.modules())) == 1
    return report.kept[0].where


@pytest.mark.parametrize(
    'norm',
    [nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False), nn.SyncBatchNorm(6), UN2d(6)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize(
    'reader',
    [
        nn.Conv2d(6, 4, 1),
        nn.Conv2d(6, 4, 3, bias=False),
        nn.Conv2d(6, 4, 3, stride=2, groups=2, dilation=2),
        nn.Conv2d(6, 6, 1, groups=6),
        nn.Conv2d(6, 4, 3, padding=1, padding_mode='reflect'),
        nn.Conv2d(6, 4, 3, padding=(2, 1), padding_mode='circular'),
        nn.Conv2d(6, 4, 1, padding='same'),
        nn.Conv2d(6, 4, 3, padding='valid'),
    ],
    ids=lambda r: str(r),
)
def test_convolutions(norm, reader):
    report = fold(Pair(copy.deepcopy(norm), copy.deepcopy(reader)), strict=True)
    assert [each.where for each in report.folded] == ['reader']


@pytest.mark.parametrize(
    'reader, x',
    [
        (nn.Linear(6, 3), X.movedim(1, -1)),
        (nn.Conv1d(6, 3, 2), X[..., 0]),
        (nn.Conv3d(6, 3, 1), X[..., None]),
    ],
    ids=['linear', 'conv1d', 'conv3d'],
)
def test_other_readers(reader, x):
    norm = {'Linear': UN, 'Conv1d': nn.BatchNorm1d, 'Conv3d': nn.BatchNorm3d}[type(reader).__name__](6)
    fold(Pair(norm, reader), x, strict=True)


@pytest.mark.parametrize(
    'norm, reader, why',
    [
        (nn.LayerNorm(9), nn.Linear(9, 3), 'LayerNorm computes its statistics at inference'),
        pytest.param(getattr(nn, 'RMSNorm', nn.LayerNorm)(9), nn.Linear(9, 3),
                     'RMSNorm computes its statistics at inference', marks=needs_rms_norm),
        (nn.GroupNorm(2, 6), nn.Conv2d(6, 3, 1), 'GroupNorm computes its statistics at inference'),
        (nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 3, 1), 'InstanceNorm2d computes its statistics'),
        (FrozenBatchNorm2d(6), nn.Conv2d(6, 3, 1), 'FrozenBatchNorm2d has no affine() to fold'),
        (nn.BatchNorm2d(6, track_running_stats=False), nn.Conv2d(6, 3, 1), 'keeps no running statistics'),
        (
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 3, 3, padding=1),
            'its neighbour reader is a 3x3 convolution that pads with zeros, which are not normalized',
        ),
        (nn.BatchNorm2d(6), nn.Conv2d(6, 3, (1, 3), padding='same'), 'pads with zeros'),
        (nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1, padding=1), 'pads with zeros'),
        (nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 3, 1), 'is a ConvTranspose2d, not a linear layer'),
        (nn.BatchNorm2d(6), nn.Sequential(nn.Conv2d(6, 3, 1)), 'is a Sequential, not a linear layer'),
        (nn.BatchNorm2d(6), nn.ReLU(), 'is a ReLU, not a linear layer'),
        (nn.BatchNorm2d(6), nn.Linear(9, 3), 'reads 9 channels where the norm has 6'),
        (
            nn.BatchNorm2d(6),
            ConvModule(6, 3, 3, padding=1, act_cfg=None),
            'reader.conv is a 3x3 convolution that pads',
        ),
        (
            nn.BatchNorm2d(6),
            ConvModule(6, 3, 3, padding=1, padding_mode='reflect', order=('act', 'conv', 'norm')),
            'is a ConvModule, not a linear layer',
        ),
    ],
    ids=lambda value: '' if isinstance(value, str) else type(value).__name__,
)
def test_reasons(norm, reader, why):
    assert why in why_kept(Pair(norm, reader))


def test_a_conv_module_reads_by_its_convolution():
    assert fold(Pair(nn.BatchNorm2d(6), ConvModule(6, 3, 1)), strict=True).folded[0].where == 'reader.conv'


def test_batch_norm_with_something_in_its_forward():
    from timm.layers import BatchNormAct2d

    assert 'no plain BatchNorm' in why_kept(Pair(BatchNormAct2d(6), nn.Conv2d(6, 3, 1)))


def test_own_affine_wins_over_torchs_formula():
    class Doubled(nn.BatchNorm2d):
        affine = None  # torch sets it as an attribute of the instance

        def __init__(self, num_features):
            super().__init__(num_features, affine=False)
            self.affine = lambda: (
                torch.full((num_features,), 2.0).double(),
                torch.ones(num_features).double(),
            )

        def forward(self, x):
            return 2 * x + 1

    fold(Pair(Doubled(6), nn.Conv2d(6, 3, 1)), strict=True)


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('name', ['weight', 'bias', 'running_var'])
def test_statistics_that_are_not_finite(name, value):
    model = Pair(UN(6), nn.Linear(6, 3)).eval()
    getattr(model.norm, name).data[2] = value
    before = model.reader.weight.clone()
    report = fuse_norms(model)
    if (name, value) == ('running_var', float('inf')):  # 1 / sqrt(inf) is 0
        assert report.folded
    else:
        assert report.kept[0].where == 'its scale or shift is not finite'
        assert torch.equal(model.reader.weight, before)


def test_negative_variance():
    model = Pair(UN(6), nn.Linear(6, 3)).eval()
    model.norm.running_var[2] = -1
    assert fuse_norms(model).kept[0].where == 'its scale or shift is not finite'


@pytest.mark.parametrize('register', ['register_forward_hook', 'register_forward_pre_hook'])
@pytest.mark.parametrize('part', ['norm', 'reader'])
def test_hooks(part, register):
    model = Pair(nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1))
    handle = getattr(getattr(model, part), register)(lambda *args: None)
    assert 'has forward hooks' in why_kept(model)
    handle.remove()
    fold(model, strict=True)


@pytest.mark.parametrize(
    'name, norms',
    [
        ('backbone.stages.0.blocks.1.attn', ['backbone.stages.0.blocks.1.norm1']),
        ('backbone.stages.0.blocks.1.attn.w_msa', ['backbone.stages.0.blocks.1.norm1']),
        ('backbone.stages.0.blocks.1.ffn', ['backbone.stages.0.blocks.1.norm2']),
        ('backbone', ['backbone.norm1']),
        ('neck', ['backbone.norm1']),
        ('head', ['backbone.norm1']),
    ],
)
def test_hooks_between_a_norm_and_its_reader(name, norms):
    """A hook that squares what passes: it would see other values."""
    model = models.swin_classifier()

    def square(module, args):
        first = args[0]
        return (tuple(each**2 for each in first) if isinstance(first, tuple) else first**2, *args[1:])

    model.get_submodule(name).register_forward_pre_hook(square)
    report = models.assert_folds(model, (37, 45), kept=norms)
    assert report.kept[0].where == f'its output passes through {name}, which has forward hooks'


def test_hooks_elsewhere_do_not_matter():
    model = models.swin_classifier()
    seen = []
    for name in ('backbone.stages.0.blocks.1', 'backbone.stages.1', ''):
        model.get_submodule(name).register_forward_hook(lambda *args: seen.append(args))
    models.assert_folds(model, (37, 45), count=11)
    assert seen


@pytest.mark.parametrize(
    'name, norms',
    [
        ('backbone.stages.0.blocks.1.attn', ['backbone.stages.0.blocks.1.norm1']),
        ('backbone.stages.0.blocks.1.attn.w_msa.qkv', ['backbone.stages.0.blocks.1.norm1']),
        (
            'backbone.stages.0.blocks.1',
            ['backbone.stages.0.blocks.1.norm1', 'backbone.stages.0.blocks.1.norm2'],
        ),
        ('backbone.stages.0.blocks.1.norm1', ['backbone.stages.0.blocks.1.norm1']),
        ('neck', ['backbone.norm1']),
        ('head', ['backbone.norm1']),
    ],
)
def test_a_forward_of_the_instance(name, norms):
    model = models.swin_classifier()
    part = model.get_submodule(name)
    stock = part.forward

    def forward(x, *args, **kwargs):
        x = tuple(each**2 for each in x) if isinstance(x, tuple) else x**2
        return stock(x, *args, **kwargs)

    part.forward = forward
    models.assert_folds(model, (37, 45), kept=norms)


@pytest.mark.parametrize(
    'change',
    [
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: parametrizations.spectral_norm(layer),
        lambda layer: torch.nn.utils.weight_norm(layer),
        lambda layer: prune.random_unstructured(layer, 'weight', 0.5),
    ],
)
@pytest.mark.filterwarnings('ignore:.*weight_norm.*')
def test_parametrized_readers(change):
    model = Pair(nn.BatchNorm2d(6), change(nn.Conv2d(6, 3, 1)))
    assert why_kept(model).split(' reader ')[1] in ('has a parametrized weight', 'has forward hooks')


class Two(nn.Module):
    """A norm with two readers, of which the second may be anything."""

    def __init__(self, second):
        super().__init__()
        self.norm, self.first, self.second = UN(6), nn.Linear(6, 3), second

    def forward(self, x):
        x = self.norm(x)
        return self.first(x), self.second(x)


@fold_rule(Two)
def two_rule(two):
    yield Into('norm', 'first', 'second')


def test_two_readers():
    tokens = X.movedim(1, -1)
    assert fold(Two(nn.Linear(6, 2)), tokens, strict=True).folded[0].where == 'first, second'
    assert (
        why_kept(Two(nn.GELU()), tokens)
        == 'its neighbour second is a GELU, not a linear layer or convolution'
    )


def shared_norm():
    first, second = Pair(UN(6), nn.Linear(6, 6)), Pair(UN(6), nn.Linear(6, 3))
    second.norm = first.norm
    return nn.Sequential(first, second)


def shared_norm_weight():
    first, second = Pair(UN(6), nn.Linear(6, 6)), Pair(UN(6), nn.Linear(6, 3))
    second.norm.weight = first.norm.weight
    return nn.Sequential(first, second)


def shared_linear():
    first, second = Pair(UN(6), nn.Linear(6, 6)), Pair(UN(6), nn.Linear(6, 6))
    second.reader = first.reader
    return nn.Sequential(first, second)


def tied_parameter():
    first, second = Pair(UN(6), nn.Linear(6, 6)), Pair(UN(6), nn.Linear(6, 6))
    second.reader.weight = first.reader.weight
    return nn.Sequential(first, second)


def tied_bias():
    first, second = Pair(UN(6), nn.Linear(6, 6)), Pair(UN(6), nn.Linear(6, 6))
    second.reader.bias = first.reader.bias
    return nn.Sequential(first, second)


def overlapping_storage():
    # Every other row of the first; the second begins where the first, if contiguous, would have ended.
    first, second = Pair(UN(6), nn.Linear(6, 6)), Pair(UN(6), nn.Linear(6, 6))
    memory = torch.randn(12, 12, dtype=torch.float64)
    first.double().reader.weight = nn.Parameter(memory[::2, :6])
    second.double().reader.weight = nn.Parameter(memory[4:10, 3:9])
    return nn.Sequential(first, second)


def tied_to_an_embedding():
    model = Pair(UN(6), nn.Linear(6, 6))
    model.table = nn.Embedding(6, 6)
    model.table.weight = model.reader.weight
    return nn.Sequential(model, nn.Linear(6, 3))


def shared_block():
    block = Pair(UN(6), nn.Linear(6, 6))
    return nn.Sequential(block, block)


@pytest.mark.parametrize(
    'make',
    [
        shared_norm,
        shared_norm_weight,
        shared_linear,
        tied_parameter,
        tied_bias,
        overlapping_storage,
        tied_to_an_embedding,
        shared_block,
    ],
)
def test_shared_modules_and_parameters_stay(make):
    model = make()
    report = fold(model, X.movedim(1, -1))
    assert not report.folded and report.kept
    assert all('is shared with' in kept.where for kept in report.kept)


def test_layers_that_lie_side_by_side_in_memory_are_not_shared():
    model = nn.Sequential(Pair(UN(6), nn.Linear(6, 6)), Pair(UN(6), nn.Linear(6, 6))).double()
    memory = torch.randn(72, dtype=torch.float64)
    model[0].reader.weight = nn.Parameter(memory[:36].view(6, 6))
    model[1].reader.weight = nn.Parameter(memory[36:].view(6, 6))
    assert len(fold(model, X.movedim(1, -1), strict=True).folded) == 2


class OtherForward(SwinBlock):
    def forward(self, x, hw_shape):
        return x + self.attn(self.norm1(x).tanh(), hw_shape) + self.ffn(self.norm2(x) ** 2, identity=x)


class SameForward(SwinBlock):
    def extra(self):
        return 1


class OtherMask(ShiftWindowMSA):
    @staticmethod
    def get_attn_mask(hw_shape, window_size, shift_size, device=None):
        return None


class OtherAttention(WindowMSA):
    def forward(self, x, mask=None):
        return super().forward(x.sin(), mask)


class Normalized(LinearClsHead):
    def pre_logits(self, feats):
        return nn.functional.normalize(feats[-1], dim=1)


BLOCK = 'backbone.stages.0.blocks.1'


def with_class(model, name, cls):
    model.get_submodule(name).__class__ = cls
    return model


@pytest.mark.parametrize(
    'name, cls, norms',
    [
        (BLOCK, OtherForward, [f'{BLOCK}.norm1', f'{BLOCK}.norm2']),
        (BLOCK, SameForward, []),
        (f'{BLOCK}.attn', OtherMask, [f'{BLOCK}.norm1']),
        (f'{BLOCK}.attn.w_msa', OtherAttention, [f'{BLOCK}.norm1']),
        ('head', Normalized, ['backbone.norm1']),
    ],
)
def test_subclasses(name, cls, norms):
    report = models.assert_folds(with_class(models.swin_classifier(), name, cls), (37, 45), kept=norms)
    for fold in report.kept:
        assert fold.where == 'no fold rule covers its place' or 'not a linear layer' in fold.where


def test_a_subclass_of_the_classifier_that_reads_features_elsewhere():
    from mmpretrain.models import ImageClassifier

    class Auxiliary(ImageClassifier):
        def forward(self, inputs, data_samples=None, mode='tensor'):
            return self.head(self.extract_feat(inputs)), self.backbone(inputs)[-1].amax((2, 3))

    model = with_class(models.swin_classifier(), '', Auxiliary)
    models.assert_folds(model, (37, 45), kept=['backbone.norm1'])


def test_strict_lists_all_and_changes_nothing():
    model = models.randomize(models.detector(add_extra_convs='on_input'))
    model.backbone.stages[0].blocks[0].norm1 = nn.LayerNorm(8).eval()
    model.backbone.stages[0].blocks[1].attn.w_msa.qkv.register_forward_hook(lambda *args: None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    with pytest.raises(NotFoldedError, match='3 norms cannot be folded') as error:
        fuse_norms(model, strict=True)
    for name, why in [
        ('backbone.norm1 (UN)', 'pads with zeros'),
        ('backbone.stages.0.blocks.0.norm1 (LayerNorm)', 'computes its statistics at inference'),
        ('backbone.stages.0.blocks.1.norm1 (UN)', 'has forward hooks'),
    ]:
        (line,) = (line for line in str(error.value).splitlines() if name in line)
        assert why in line
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert classes == [type(module) for module in model.modules()]


@pytest.mark.parametrize('part', ['', 'backbone.stages.1', 'head.fc'])
def test_training_mode_is_an_error(part):
    model = models.swin_classifier().eval()
    model.get_submodule(part).train()
    with pytest.raises(ValueError, match=f'model: {part or "it"} is in training mode; call model.eval'):
        fuse_norms(model)
    assert sum(map(is_norm, model.modules())) == 11


def test_a_model_without_norms_and_a_bare_norm():
    report = fuse_norms(nn.Linear(2, 2).eval(), strict=True)
    assert report.folded == report.kept == () and str(report) == '0 of 0 norms folded'
    assert fuse_norms(UN(4).eval()).kept[0].where == 'no fold rule covers its place'


def test_a_folded_norm_takes_what_a_norm_takes():
    x = torch.randn(2, 3, 4)
    assert FoldedNorm()(x, pad_mask=torch.zeros(2, 3, dtype=torch.bool)) is x
    assert FoldedNorm()(x, None) is x
