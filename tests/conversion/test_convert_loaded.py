"""convert_loaded: offline norms that were loaded with the weights of LayerNorms."""
import copy

import pytest
import torch
from mmpretrain.models.utils import LayerNorm2d
from torch import nn

from mmunorm import convert_norms, replace_norms
from mmunorm.conversion import ConversionError, convert_loaded

from .models import chain, norms_of, tokens

UN = dict(type='UN')


def loaded(model, norm_cfg=UN):
    """The model with offline norms, and weights of `model` in it; its first norm is in no checkpoint."""
    new = replace_norms(copy.deepcopy(model), norm_cfg)
    state = {key: value for key, value in model.state_dict().items() if not key.startswith('0.')}
    new.load_state_dict(state, strict=False)
    with torch.no_grad():
        new[0].weight.fill_(1)
        new[0].bias.zero_()
    return new


@pytest.mark.parametrize('norm_cfg', [UN, dict(type='UN', centered=True, eta=0.5), dict(type='RepBN')],
                         ids=['UN', 'UN+', 'RepBN'])
def test_gives_what_convert_norms_gives_in_the_same_modules(norm_cfg):
    model, x = chain(), tokens(40, 5, 6)
    nn.init.ones_(model[0].weight), nn.init.zeros_(model[0].bias)  # as a fresh norm
    new = loaded(model, norm_cfg)
    parameters, modules = list(new.parameters()), list(new.modules())
    report = convert_loaded(new, x.split(16))
    assert report.norms == convert_norms(model, x.split(16), norm_cfg).norms
    assert all(a is b for a, b in zip(parameters, new.parameters(), strict=True))
    assert all(a is b for a, b in zip(modules, new.modules(), strict=True))
    torch.testing.assert_close(new.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not any(norm.lacks_statistics for norm in norms_of(new).values())


def test_norms_with_statistics_stay():
    model, x = chain(), tokens(40, 6)
    new = loaded(model)
    new[2].running_var.fill_(2.)
    new[2].lacks_statistics = False
    kept = copy.deepcopy(new[2].state_dict())
    assert [norm.norm for norm in convert_loaded(new, [x]).norms] == ['0', '4']
    torch.testing.assert_close(new[2].state_dict(), kept, rtol=0, atol=0)
    with pytest.raises(ConversionError, match='no norm has the scale of a LayerNorm and no statistics'):
        convert_loaded(new, [x])


def test_norms_over_maps():
    model = nn.Sequential(LayerNorm2d(4), nn.Conv2d(4, 4, 1), LayerNorm2d(4))
    x = tokens(2, 5, 5, 4).permute(0, 3, 1, 2)
    new = loaded(model)
    convert_loaded(new, [x])
    convert_norms(model, [x], UN)
    torch.testing.assert_close(new.eval()(x), model.eval()(x))


def test_an_error_leaves_the_model_as_it_was():
    model, x = chain(), tokens(40, 6)
    new = loaded(model)
    before = copy.deepcopy(new.state_dict())
    with torch.no_grad():
        new[3].weight[0] = float('inf')
    for batches, message in (([x], 'not finite'), ([], 'there is none')):
        with pytest.raises(ConversionError, match=message):
            convert_loaded(new, batches)
        new[3].weight.data.copy_(before['3.weight'])
        torch.testing.assert_close(new.state_dict(), before, rtol=0, atol=0)
        assert [norm.lacks_statistics for norm in norms_of(new).values()] == [False, True, True]
