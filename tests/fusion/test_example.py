"""With an example, what ran decides: wrappers that use a known model in another way, wrong rules, copies."""
import copy
import itertools
import re

import pytest
import timm
import torch
import torchvision
from mmpretrain.models import ImageClassifier
from mmpretrain.models.classifiers import BaseClassifier
from timm.layers import DropPath
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

from mmunorm import UN, UN2d, convert_norms, fuse_norms, replace_norms
from mmunorm.fusion import Fills, JointFold, NotExactError, NotFoldedError, fold_rule

from . import models
from .blocks import DIM, Block

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
TOKENS = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(12), dtype=torch.float64)


class Wrapper(Block):
    """A model that a user puts around another one."""

    def __init__(self, compute, inner, channels=16):
        super().__init__(compute, dict(inner=inner, fc=nn.Linear(channels, 3)))


def two_heads(self, x):
    return self.inner(x), self.fc(self.inner.extract_feat(x)[-1])


def timm_blocks(self, x):
    """One by one, and the last norm by hand."""
    x = self.inner.patch_embed(x) + self.inner.pos_embed[:, 1:]
    for block in self.inner.blocks:
        x = block(x)
    return self.fc(self.inner.norm(x).mean(1))


def timm_norm_read_twice(self, x):
    """A norm in the middle of a block is consumed by something else, too."""
    return self.inner(x), self.fc(self.inner.blocks[0].norm1(x.flatten(1)[:, :16 * 5].unflatten(1, (5, 16))))


def timm_intermediates(self, x):
    y, maps = self.inner.forward_intermediates(x, norm=True)
    return (self.fc(y.mean(1)), *(features.amax((2, 3)) for features in maps))


def swin_stages(self, x):
    x = self.inner.patch_embed(x)
    for layer in self.inner.layers:
        x = layer(x)
    return self.fc(self.inner.norm(x).amax((1, 2)))


# What makes the model that is wrapped, how it is used, and which of its norms stay; 'fc' takes the last one of others.
WRAPPERS = {
    'two_heads': (models.swin_classifier, two_heads, []),
    'timm_blocks': (models.timm_vit, timm_blocks, []),
    'timm_norm_read_twice': (models.timm_vit, timm_norm_read_twice, []),
    'timm_intermediates': (models.timm_vit, timm_intermediates, ['inner.norm']),
    'timm_swin_stages': (models.timm_swin, swin_stages, ['inner.norm']),
}


@pytest.mark.parametrize('name', WRAPPERS)
def test_a_wrapper_that_uses_a_known_model_in_another_way(name):
    make, compute, kept = WRAPPERS[name]
    model = Wrapper(compute, make())
    report = models.fold(copy.deepcopy(model), IMAGES)
    assert not report.folded and all('no fold rule can run Wrapper' in fold.where for fold in report.kept)
    report = models.fold(model, IMAGES, example=IMAGES)
    assert [fold.norm for fold in report.kept] == kept == models.norms(model) and report.difference < 1e-12


class Auxiliary(ImageClassifier):
    """Reads features elsewhere."""

    def forward(self, inputs, data_samples=None, mode='tensor'):
        return self.head(self.extract_feat(inputs)), self.backbone(inputs)[-1].amax((2, 3))


def test_a_subclass_of_a_known_model_that_reads_features_elsewhere():
    model = models.swin_classifier()
    model.__class__ = Auxiliary
    assert [fold.norm for fold in models.fold(model, IMAGES).kept] == ['backbone.norm1']


class Padded(nn.Module):

    def __init__(self):
        super().__init__()
        self.pad, self.fc = Block(lambda self, x: nn.functional.pad(x, (0, 0, 0, 3)), {}), nn.Linear(DIM, 3)

    def forward(self, x):
        return self.fc(self.pad(x))


def fill_with_zeros(module, fill):
    return module


def do_not_pad(module, fill):
    module.pad.forward = lambda x: x
    return module


def do_not_call(module, fill):
    module.forward = lambda x: nn.functional.linear(module.pad(x), module.fc.weight, module.fc.bias)
    return module


@pytest.mark.parametrize('pad, difference', [(fill_with_zeros, '[0-9]'), (do_not_pad, 'inf'), (do_not_call, 'inf')])
def test_a_rule_that_is_wrong_keeps_its_norm_alone(pad, difference):
    """A run sees that a module pads, and a rule says that it can fill; what with, only a folded copy tells."""
    fold_rule(Padded)(lambda module: [Fills(pad)])
    model = nn.Sequential(UN(DIM), nn.Linear(DIM, DIM), UN(DIM), Padded())
    state = copy.deepcopy(models.randomize(model, gamma='none').state_dict())
    why = (f'the output of 3.fc differs by {difference}.* of its largest value when it is folded: it has a consumer '
           r'other than linear layers, another formula than its affine\(\), or a wrong fold rule')
    with pytest.raises(NotFoldedError, match=f'1 norm cannot be folded:\n  2 .UN.: {why}'):
        fuse_norms(model, example=TOKENS.float(), strict=True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    report = fuse_norms(model, example=TOKENS.float())
    assert [fold.norm for fold in report.folded] == ['0'] and re.match(why, report.kept[0].where)
    assert isinstance(model[2], UN)


@pytest.mark.parametrize('actual', [3., float('inf')])
def test_a_wrong_joint_fold_is_left_out(actual):
    """The layer that takes the factor up gives something else, as it should."""
    class Times(nn.Module):
        def forward(self, x):
            return actual * x

    class Factor(JointFold):
        def within(self, prefix):
            return self

        def apply(self, model, plan):
            model.fc.weight *= 2
            model.fc.bias *= 2
            model.times = nn.Identity()

    class Scaled(Block):
        def forward(self, x):
            return self.times(self.fc(self.norm(x)))

    fold_rule(Scaled)(lambda module: [Factor(changed=('fc', ))])
    model = Scaled(None, dict(norm=UN(DIM), fc=nn.Linear(DIM, 3), times=Times()))
    assert len(fuse_norms(models.randomize(model), example=TOKENS.float(), strict=True).folded) == 1
    assert isinstance(model.times, Times)


def test_outputs_that_differ_from_call_to_call_are_refused():
    calls = itertools.count()
    model = models.randomize(Block(lambda self, x: self.fc(self.norm(x)) + next(calls),
                                   dict(norm=UN(DIM), fc=nn.Linear(DIM, 3))))
    with pytest.raises(NotExactError, match='differs from the model before a norm is folded'):
        fuse_norms(model, example=TOKENS.float())
    assert isinstance(model.norm, UN)


@pytest.mark.parametrize('also', [lambda self, y: self.other(y), lambda self, y: self.padded.fc(y),
                                  lambda self, y: y.mean(1)])
def test_padding_that_some_readers_do_not_see_keeps_the_norm(also):
    """The marker of padded tokens would mean something to them."""
    def compute(self, x):
        y = self.norm(x)
        return self.padded(y).sum(1) + also(self, y).sum()

    fold_rule(Padded)(lambda module: [Fills(lambda module, fill: module)])
    model = Block(compute, dict(norm=UN(DIM), padded=Padded(), other=nn.Linear(DIM, 3)))
    kept, = models.fold(model, TOKENS, example=TOKENS).kept
    assert re.search('the output of padded.fc differs by .* or a wrong fold rule|is consumed by sum', kept.where)


@pytest.mark.parametrize('container', [lambda x: x, lambda x: [{'last': x}]])
def test_a_model_that_keeps_tensors_that_were_computed(container):
    model = models.randomize(nn.Sequential(UN(DIM), nn.Linear(DIM, 2)).double())
    model.features = container(model(TOKENS))
    models.fold(model, TOKENS, example=TOKENS, strict=True)


def test_a_model_that_cannot_be_copied():
    model = nn.Sequential(UN(DIM), nn.Linear(DIM, 2)).eval()
    model.stream = (value for value in range(3))
    with pytest.raises(RuntimeError, match='model: folding runs a copy of it, .* cannot be copied: TypeError'):
        fuse_norms(model, example=TOKENS.float())


def test_the_feature_extractor_of_torchvision():
    vit = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5).eval()
    nn.init.normal_(vit.heads.head.weight)
    model = create_feature_extractor(vit, ['heads.head']).eval()
    convert_norms(model, [IMAGES.float()])
    assert len(fuse_norms(model, strict=True, example=IMAGES.float()).folded) == 5


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_a_model_that_asks_a_norm_for_dtype_and_device(dtype):
    model = Block(lambda self, x: self.fc(self.norm(x.to(self.norm.weight.dtype).to(self.norm.bias.device))),
                  dict(norm=UN(DIM), fc=nn.Linear(DIM, 3))).to(dtype).eval()
    fuse_norms(model, strict=True, example=TOKENS)
    assert model(TOKENS).dtype == dtype and model.float()(TOKENS).dtype == torch.float32


@pytest.mark.parametrize('name, size', [
    ('swin_tiny_patch4_window7_224', dict(img_size=(44, 28), window_size=3)),
    ('swinv2_cr_tiny_ns_224', dict(img_size=48))])
def test_timms_swins_of_another_input_size(name, size):
    model = timm.create_model(name, img_size=32, window_size=4, num_classes=3, embed_dim=8, depths=(1, 2),
                              num_heads=(1, 2))
    model = models.randomize(replace_norms(model, models.UN).double(), gamma='none')
    twin = copy.deepcopy(model)
    fuse_norms(model, example=IMAGES)
    for instance in (model, twin):
        instance.set_input_size(**size)
    x = torch.randn(1, 3, *((44, 28) if 'window_size' in size else (48, 48)), dtype=torch.float64)
    models.assert_equal(models.outputs(model, x), models.outputs(twin, x))


def test_an_adapter_that_is_merged_later_keeps_the_norm():
    class Adapter(nn.Module):
        """As LoRA of peft."""

        def __init__(self):
            super().__init__()
            self.base, self.a, self.b = nn.Linear(DIM, 3), nn.Linear(DIM, 2, bias=False), nn.Linear(2, 3, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

        def merge(self):
            self.base.weight.data += self.b.weight @ self.a.weight

        def unmerge(self):
            self.base.weight.data -= self.b.weight @ self.a.weight

    model = models.randomize(nn.Sequential(UN(DIM), Adapter()).double())
    kept, = models.fold(model, TOKENS, example=TOKENS).kept
    assert 'is part of Adapter, whose merge() would undo the fold' in kept.where


def test_a_function_runs_the_model_in_its_own_way():
    model = models.randomize(models.mmdet_detector())

    def whole(model):  # what it returns is not compared
        model(IMAGES.to(next(model.parameters()).dtype), mode='tensor')

    def feature_maps(model):
        return model.extract_feat(IMAGES.to(next(model.parameters()).dtype))

    report = models.fold(model, IMAGES, example=[whole, feature_maps])
    assert len(report.folded) == 12 and not report.kept and report.difference < 1e-12


class Output:
    """An output that is no tensor."""

    def __init__(self, logits):
        self.logits = dict(all=[logits])


@pytest.mark.parametrize('finish, least, most', [
    (lambda self, x: Output(self.fc(self.norm(x))), 0, 1e-9),
    # Casts are left out where copies in float64 are compared.
    (lambda self, x: self.fc(self.norm(x).float()), 0, 1e-9),
    (lambda self, x: self.fc(self.norm(x) + torch.zeros(1).to(self.fc.weight.dtype).numpy().astype('float32').item()
                             if x.dtype == torch.float32 else self.fc(None)), 1e-9, 1e-3)],
                         ids=['an_object', 'float32', 'float32_alone'])
def test_outputs_of_every_kind_are_compared(finish, least, most):
    """In the model's own dtype if it does not run in float64."""
    model = Block(finish, dict(norm=UN(DIM), fc=nn.Linear(DIM, 3)))
    report = fuse_norms(models.randomize(model), example=TOKENS.float(), strict=True)
    assert least <= report.difference < most


def test_frozen_batch_norm_folds_into_the_convolution_before_it():
    """torchvision's, and that of transformers' DETRs, which has no `eps`."""
    class DetrFrozenBatchNorm2d(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ('weight', 'bias', 'running_mean', 'running_var'):
                self.register_buffer(name, torch.rand(4) + 0.5)

        def forward(self, x):
            scale = (self.weight * (self.running_var + 1e-5).rsqrt()).view(1, -1, 1, 1)
            return x * scale + self.bias.view(1, -1, 1, 1) - self.running_mean.view(1, -1, 1, 1) * scale

    for norm in (torchvision.ops.FrozenBatchNorm2d(4), DetrFrozenBatchNorm2d()):
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), norm, nn.ReLU(), nn.Conv2d(4, 2, 1))
        assert [fold.where for fold in models.fold(net, IMAGES, example=IMAGES).folded] == ['back into 0']


def test_dropout_paths_and_maps_do_not_matter_and_the_example_stays_as_it_is():
    model = Block(lambda self, x: x + self.drop(self.conv(self.norm(x.mul_(2)))),
                  dict(norm=UN2d(3), conv=nn.Conv2d(3, 3, 1), drop=DropPath(0.5)))
    x = IMAGES.clone()
    fuse_norms(models.randomize(model.double()), example=x, strict=True)
    assert torch.equal(x, IMAGES)


def two_norms_of_one_layer(self, x):
    y = self.fc(x)
    return self.norm(y).tanh() + self.other(y).tanh()


def two_norms_of_two_layers(self, x):
    y, z = self.fc(x), self.second(x)
    return torch.cat([self.norm(y).tanh(), self.wide(torch.cat([y, z], -1)).tanh()], -1)


@pytest.mark.parametrize('compute', [two_norms_of_one_layer, two_norms_of_two_layers])
def test_layers_that_several_norms_read(compute):
    parts = dict(fc=nn.Linear(DIM, DIM), second=nn.Linear(DIM, DIM), norm=UN(DIM), other=UN(DIM), wide=UN(2 * DIM))
    kept = models.fold(Block(compute, parts), TOKENS, example=TOKENS).kept
    assert sum(fold.where == 'its output is consumed by tanh' for fold in kept) == 2


def test_a_norm_without_which_the_model_does_not_run_stays():
    def compute(self, x):
        return self.fc(self.norm(self.first(self.before(x)))) * self.norm.num_features

    parts = dict(before=UN(DIM), first=nn.Linear(DIM, DIM), norm=UN(DIM), fc=nn.Linear(DIM, 3))
    report = models.fold(Block(compute, parts), TOKENS, example=TOKENS)
    assert [fold.where for fold in report.folded] == ['first']
    why = r'the model does not run on the example \(AttributeError: .* when it is folded'
    assert re.match(why, report.kept[0].where)


def test_a_norm_that_gets_nothing():
    model = Block(lambda self, x: self.fc(self.norm(x)), dict(norm=UN(DIM), fc=nn.Linear(DIM, 3)))
    assert fuse_norms(models.randomize(model), example=torch.zeros(0, 5, DIM)).difference in (None, 0)


@pytest.mark.parametrize('make', [
    lambda: models.build(models.vit_backbone()), lambda: timm.create_model('resnet10t', num_classes=3)])
def test_backbones_alone_and_stems_of_several_convolutions(make):
    model = make().double()
    models.randomize(model)  # mmpretrain's return None
    assert fuse_norms(model).difference < 1e-10
    with pytest.raises(TypeError, match='model: must be an nn.Module, got NoneType'):
        fuse_norms(None)


class OfTorchvision(BaseClassifier):
    """A classifier around a model of another library that takes images of one size alone, as transformers' ViTs."""

    def __init__(self):
        super().__init__(data_preprocessor=dict(type='mmpretrain.ClsDataPreprocessor'))
        self.model = torchvision.models.VisionTransformer(40, 8, 1, 2, 16, 32, num_classes=3)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        return self.model(inputs)


def test_the_size_of_a_model_of_another_library():
    model = OfTorchvision()
    assert replace_norms(model, dict(type='UN'))
    report = fuse_norms(model.eval(), strict=True)
    assert len(report.folded) == 3


@pytest.mark.parametrize('norm', [UN(8), nn.LayerNorm(8)])
def test_a_function_whose_input_is_always_in_float32(norm):
    model = models.randomize(nn.Sequential(norm, nn.Linear(8, 8))).eval()
    report = fuse_norms(model, example=lambda model: model(torch.randn(2, 5, 8)))
    assert not report.kept and report.difference < 1e-6
