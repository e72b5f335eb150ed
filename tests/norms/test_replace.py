"""replace_norms: another norm in every LayerNorm's place, with its scale and shift."""
import copy
import importlib
import pickle

import pytest
import timm
import torch
from torch import nn

from mmunorm import UN, convert_norms, replace_norms
from mmunorm.norms import UN2d

from ..fusion.models import PreTrainedModel


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


@pytest.mark.parametrize('norm_type', ['UN', 'DyT', 'NoNorm'])
def test_scale_and_shift_stay_and_a_shared_norm_is_shared(norm_type):
    model = Net()
    old = copy.deepcopy(model)
    assert replace_norms(model, dict(type=norm_type)) is model
    assert [type(module).__name__ for module in model.modules()].count(norm_type) == 3 and model.second is model.again
    for name in ('first', 'second', 'plain'):
        for key, value in getattr(model, name).named_parameters():
            before = getattr(getattr(old, name), key, None)
            before = torch.full_like(value, key == 'weight') if before is None else before
            assert key == 'alpha' or torch.equal(value, before)
    assert model(torch.randn(2, 3, 4)).shape == (2, 3, 6)


def test_parameters_are_the_same_objects():
    """Other norms, layers, functions and optimizers may hold them, too."""
    model = Net()
    model.plain = timm.layers.LayerNormAct(4)
    model.plain.weight = model.first.weight
    weight, optimizer = model.first.weight, torch.optim.SGD(model.parameters(), 1.)
    replace_norms(model, dict(type='UN'))
    assert model.first.weight is model.plain.norm.weight is weight
    model(torch.randn(2, 3, 4)).square().sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.first.weight, before) and torch.equal(model.first.weight, model.plain.norm.weight)
    assert replace_norms(nn.LayerNorm(4), dict(type='UN', requires_grad=False)).weight.requires_grad is False


def test_dtype_device_mode_and_requires_grad():
    model = Net().to('meta', torch.bfloat16).eval()
    model.first.weight.requires_grad = False
    replace_norms(model, dict(type='UN', window=3))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {'meta'}
    for norm in (model.first, model.second, model.plain):
        assert (norm.weight.dtype, norm.running_var.dtype) == (torch.bfloat16, torch.float32) and norm.window == 3
        assert norm.num_batches_tracked.dtype == torch.long and not norm.training
    assert [model.first.weight.requires_grad, model.first.bias.requires_grad] == [False, True]
    model = replace_norms(Net(), dict(type='UN', requires_grad=False))
    assert not model.first.weight.requires_grad and not model.second.bias.requires_grad
    frozen = Net().requires_grad_(False)
    assert not any(p.requires_grad for p in replace_norms(frozen, dict(type='UN', eta=0.)).first.parameters())


class WithGate(nn.LayerNorm):

    def __init__(self):
        super().__init__(4)
        self.gate = nn.Linear(4, 4)


@pytest.mark.parametrize('part, norm_cfg, error, match', [
    (nn.Linear(4, 4), dict(type='UN'), ValueError, 'model: Sequential has no LayerNorm or RMSNorm$'),
    (nn.LayerNorm((3, 4)), dict(type='UN'), ValueError, r'model: 0 is a LayerNorm over \(3, 4\); only norms over the'),
    (WithGate(), dict(type='UN'), ValueError, 'model: 0 is a WithGate; its gate would be lost with it'),
    (timm.layers.LayerNorm2d(4), dict(type='DyT'), ValueError, 'norm_cfg: DyT does not support inputs .* one of UN, '),
    (nn.LayerNorm(4), 'UN', TypeError, "norm_cfg='UN': must be a dict that names its type"),
    (nn.LayerNorm(4), dict(type='UNN'), KeyError, "norm_cfg: there is no norm 'UNN'; did you mean UN"),
    (nn.LayerNorm(4), dict(type='UN', window=0), ValueError, 'window must be'),
    (nn.LayerNorm(4), dict(type='UN', windows=2), TypeError, "unexpected keyword argument 'windows'"),
])
def test_errors_do_not_change_the_model(part, norm_cfg, error, match):
    model = nn.Sequential(part, nn.Identity() if isinstance(part, nn.Linear) else nn.LayerNorm(4))
    before = [(name, id(module)) for name, module in model.named_modules()]
    with pytest.raises(error, match=match):
        replace_norms(model, norm_cfg)
    assert before == [(name, id(module)) for name, module in model.named_modules()]


KINDS = ['timm.layers.LayerNorm', 'timm.layers.LayerNorm2d', 'timm.layers.LayerNorm2dFp32', 'timm.layers.LayerNormFp32',
         'timm.layers.RmsNorm', 'timm.layers.RmsNorm2d', 'timm.layers.RmsNormFp32', 'timm.layers.LayerNormAct',
         'timm.layers.LayerNormAct2d', 'timm.layers.norm_act.RmsNormAct2d', 'timm.layers.norm.LayerNormExp2d',
         'mmpretrain.models.utils.norm.LayerNorm2d', 'torch.nn.LayerNorm', 'torch.nn.RMSNorm',
         'timm.models.metaformer.LayerNorm2dNoBias', 'mmpretrain.models.backbones.hornet.HorNetLayerNorm']


@pytest.mark.parametrize('name', KINDS)
def test_every_kind_of_norm(name):
    """The new norm is over the same axis: with the statistics of one token, both have the same output of it."""
    module, _, cls = name.rpartition('.')
    kind = getattr(importlib.import_module(module), cls, None)
    if kind is None:
        pytest.skip(f'{module} has no {cls}')
    norm = kind(6).eval()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    new = replace_norms(nn.Sequential(norm), dict(type='UN', centered=True, eps=1e-12)).eval()[0]
    is_map = '2d' in name.lower()
    unit = new.norm if isinstance(new, nn.Sequential) else new
    assert type(unit) is (UN2d if is_map else UN) and torch.equal(unit.weight, norm.weight)
    x = torch.randn(6)
    mean = x.mean() * ('Rms' not in name and 'RMS' not in name)
    with torch.no_grad():
        unit.running_mean.fill_(mean)
        unit.running_var.fill_((x - mean).square().mean() + (norm.eps or 1e-7))
    x = x.view(1, 6, 1, 1) if is_map else x.view(1, 1, 1, 6)
    torch.testing.assert_close(new(x), norm(x.clone()), rtol=1e-4, atol=1e-4)


def test_layer_norm_of_either_format():
    """mmpretrain's LN2d may be called for tokens, HorNet's norm be built for maps."""
    from mmpretrain.models.backbones.hornet import HorNetLayerNorm
    from mmpretrain.models.utils.norm import LayerNorm2d
    x = torch.randn(2, 4, 3, 3)
    norm = replace_norms(LayerNorm2d(4), dict(type='UN')).eval()
    assert torch.equal(norm(x), norm(x.permute(0, 2, 3, 1), data_format='channel_last').permute(0, 3, 1, 2))
    assert type(replace_norms(HorNetLayerNorm(4, data_format='channels_first'), dict(type='UN'))) is UN2d


def test_encoder_layers_call_their_norms():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = replace_norms(nn.TransformerEncoder(layer, 2), dict(type='UN')).eval()
    called = []
    for name, module in encoder.named_modules():
        if isinstance(module, UN):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    with torch.no_grad():
        encoder(torch.randn(2, 5, 8), src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    assert called == ['layers.0.norm1', 'layers.0.norm2', 'layers.1.norm1', 'layers.1.norm2']
    assert encoder.layers[0].activation is nn.functional.relu


@pytest.mark.parametrize('convert', [lambda model: replace_norms(model, dict(type='UN')),
                                     lambda model: convert_norms(model, torch.randn(8, 3, 16, 16))])
def test_save_pretrained_is_refused(convert):
    """`from_pretrained` would build LayerNorms."""
    model, kept = nn.Sequential(PreTrainedModel()), PreTrainedModel()
    convert(model)
    for part in (model[0], copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0]):
        with pytest.raises(RuntimeError, match='^save_pretrained: the model has norms of mmunorm.*replace_norms'):
            part.save_pretrained('folder')
    assert kept.save_pretrained('folder') == 'folder'
    with pytest.raises(ValueError, match='batches: there is none'):
        convert_norms(kept, [])
    assert kept.save_pretrained('folder') == 'folder'
