"""replace_norms: another norm in every LayerNorm's place, with its scale and shift."""
import copy

import pytest
import timm
import torch
from torch import nn

from mmunorm import UN, DyT, replace_norms
from mmunorm.norms import NoNorm


class Net(nn.Module):
    """Two norms, of which the second is used under two names, and one without scale and shift."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(6)
        self.again = self.second
        self.plain = nn.LayerNorm(4, elementwise_affine=False)
        self.between = nn.Linear(4, 6)
        for norm in (self.first, self.second):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x):
        return self.again(self.second(self.between(self.plain(self.first(x)))))


def test_scale_and_shift_stay():
    model = Net()
    old = copy.deepcopy(model)
    assert replace_norms(model, dict(type='UN', window=3)) is model
    for name in ('first', 'second', 'plain'):
        norm = getattr(model, name)
        assert type(norm) is UN and norm.window == (3, 3)
        if name != 'plain':
            assert torch.equal(norm.weight, getattr(old, name).weight)
            assert torch.equal(norm.bias, getattr(old, name).bias)
    assert torch.equal(model.plain.weight, torch.ones(4)) and model.plain.num_features == 4
    assert model(torch.randn(2, 3, 4)).shape == (2, 3, 6)


def test_a_shared_norm_stays_shared():
    model = replace_norms(Net(), dict(type='UN'))
    assert model.second is model.again and model.first is not model.plain
    assert len([m for m in model.modules() if isinstance(m, UN)]) == 3


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_dtype_of_every_norm(dtype):
    model = replace_norms(Net().to(dtype), dict(type='UN'))
    for norm in (model.first, model.second, model.plain):
        assert norm.weight.dtype == norm.running_var.dtype == dtype
        assert norm.num_batches_tracked.dtype == torch.long


def test_device_of_every_norm():
    model = replace_norms(Net().to('meta'), dict(type='UN'))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {'meta'}


@pytest.mark.parametrize('training', [True, False])
def test_mode(training):
    model = replace_norms(Net().train(training), dict(type='UN'))
    assert {module.training for module in model.modules()} == {training}


def test_requires_grad():
    model = Net()
    model.first.weight.requires_grad = False
    replace_norms(model, dict(type='UN'))
    assert [model.first.weight.requires_grad, model.first.bias.requires_grad] == [False, True]
    model = replace_norms(Net(), dict(type='UN', requires_grad=False))
    assert not model.first.weight.requires_grad and not model.second.bias.requires_grad


def test_a_layer_norm_without_shift():
    norm = nn.LayerNorm(4, bias=False)
    nn.init.normal_(norm.weight)
    new = replace_norms(norm, dict(type='UN'))
    assert type(new) is UN and torch.equal(new.weight, norm.weight) and torch.equal(new.bias, torch.zeros(4))


def test_norms_with_other_parameters():
    model = Net()
    weight = model.first.weight.clone()
    replace_norms(model, dict(type='DyT'))
    assert type(model.first) is DyT and torch.equal(model.first.weight, weight)
    replaced = replace_norms(Net(), dict(type='NoNorm'))
    assert type(replaced.first) is NoNorm and replaced.first.weight is None


@pytest.mark.parametrize('norm', [nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False)])
def test_a_model_that_is_a_norm(norm):
    assert type(replace_norms(norm, dict(type='UN'))) is UN


@pytest.mark.parametrize('name, count', [('swin_tiny_patch4_window7_224', 29), ('vit_tiny_patch16_224', 25),
                                         ('deit_tiny_distilled_patch16_224', 25)])
def test_timm(name, count):
    model = replace_norms(timm.create_model(name), dict(type='UN'))
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(UN) == count and not any(issubclass(kind, nn.LayerNorm) for kind in kinds)


def test_torchvision():
    from torchvision.models import VisionTransformer
    model = replace_norms(VisionTransformer(32, 8, 2, 2, 16, 24), dict(type='UN'))
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 1000)


def with_activation():
    from timm.layers import LayerNormAct
    return LayerNormAct(4)


def channels_first():
    from timm.layers import LayerNorm2d
    return LayerNorm2d(4)


@pytest.mark.parametrize('make, error', [
    (lambda: nn.Linear(4, 4), 'model: Sequential has no LayerNorm|^$'),
    (lambda: nn.LayerNorm((3, 4)), r'model: 1 is a LayerNorm over \(3, 4\); only LayerNorms over the last'),
    (channels_first, 'model: 1 is a LayerNorm2d over'),
    (with_activation, 'model: 1 is a LayerNormAct; its .*act would be lost'),
    (lambda: nn.TransformerEncoderLayer(4, 2), 'model: 1.norm1 is in an nn.TransformerEncoderLayer'),
], ids=['none', 'two_dims', 'channels_first', 'activation', 'torch_encoder'])
def test_what_cannot_be_replaced(make, error):
    part = make()
    model = nn.Sequential(nn.LayerNorm(4) if not isinstance(part, nn.Linear) else nn.Identity(), part)
    before = [(name, id(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=error):
        replace_norms(model, dict(type='UN'))
    assert before == [(name, id(module)) for name, module in model.named_modules()]


def test_convnext_is_refused_whole():
    model = timm.create_model('convnext_atto')
    with pytest.raises(ValueError, match='stem.1 is a LayerNorm2d'):
        replace_norms(model, dict(type='UN'))
    assert not any(isinstance(module, UN) for module in model.modules())


@pytest.mark.parametrize('norm_cfg, error, match', [
    ('UN', TypeError, "norm_cfg='UN': must be a dict that names its type"),
    (None, TypeError, 'norm_cfg=None'),
    (dict(window=4), TypeError, "such as dict\\(type='UN'\\)"),
    (dict(type='UNN'), KeyError, 'UNN'),
    (dict(type='UN', window=0), ValueError, 'window must be'),
    (dict(type='UN', windows=2), TypeError, 'windows'),
])
def test_bad_configs_leave_the_model_as_it_was(norm_cfg, error, match):
    model = Net()
    before = [(name, id(module)) for name, module in model.named_modules()]
    config = copy.deepcopy(norm_cfg)
    with pytest.raises(error, match=match):
        replace_norms(model, norm_cfg)
    assert before == [(name, id(module)) for name, module in model.named_modules()] and norm_cfg == config
