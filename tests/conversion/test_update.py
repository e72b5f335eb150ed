"""update_norms: statistics of other weights, for what update_bn is to BatchNorms."""
import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from mmunorm import update_norms
from mmunorm.conversion import ConversionError

from ..norms.cases import build, every_offline_norm
from .models import assert_same, tokens


def pair(name='UN'):
    return nn.Sequential(nn.Linear(6, 6), build(name), nn.Linear(6, 6), build(name, seed=1)).train()


@every_offline_norm
def test_the_statistics_are_those_of_all_tokens(name):
    model, x = pair(name), tokens(60, 7, 6)
    before = copy.deepcopy(model)
    update_norms(model, [x[:20], (x[20:50], 'labels'), x[50:]])
    assert all(module.training for module in model.modules())
    read = model[1].statistics_input(model[0](x)).detach().double().flatten(0, 1)
    if model[1].centered != 'frozen':
        mean = read.mean(0) if model[1].centered else 0
        torch.testing.assert_close(model[1].running_var.double(), (read - mean).square().mean(0))
    if model[1].centered:
        expected = read.mean(0) if model[1].centered is True else before[1].running_mean.double()
        torch.testing.assert_close(model[1].running_mean.double(), expected)
        torch.testing.assert_close(model[1].running_var.double(), (read - expected).square().mean(0))
    for key, value in before.named_parameters():
        assert torch.equal(model.get_parameter(key), value)
    assert model[1].num_batches_tracked == 0
    whole = copy.deepcopy(before)  # one batch: then the second norm, too, has seen all that it reads
    update_norms(whole, x)
    read = whole.eval()[2](whole[1](whole[0](x)))
    update_norms(whole[3:], read.detach())
    again = whole[3].running_var.clone()
    torch.testing.assert_close(model[3].running_var, again, rtol=0.2, atol=1e-3)


def test_an_average_of_weights_gets_its_own_statistics():
    """Weights that are half of a scale and its negative, so that the statistics of neither are those of the mean."""
    averaged, x = AveragedModel(pair()), tokens(100, 6)
    for factor in (1, 3):
        model = pair()
        model[0].weight.data *= factor
        for _ in range(30):
            model(x).sum().backward()
        averaged.update_parameters(model)
    before = copy.deepcopy(averaged)
    update_bn([x], averaged)
    assert_same(averaged, before)  # torch's function does not know UN: the reason for this one
    update_norms(averaged, [x])
    expected = averaged.module[0](x).square().mean(0)
    torch.testing.assert_close(averaged.module[1].running_var, expected)
    assert not torch.allclose(before.module[1].running_var, expected, rtol=0.05)


def test_infinite_statistics_are_replaced():
    model, x = pair(), tokens(40, 6)
    expected = copy.deepcopy(model)
    update_norms(expected, x)
    model[1].running_var[2] = float('inf')
    update_norms(model, x)
    assert_same(model, expected)


def test_norms_that_do_not_run_and_padding():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.idle = build('UN'), build('UN')

        def forward(self, x):
            return self.norm(x, torch.arange(len(x)) % 2 == 1)

    net, x = Net(), tokens(40, 6)
    update_norms(net, x)
    torch.testing.assert_close(net.norm.running_var, x[::2].square().mean(0))
    assert (net.idle.running_var == 1).all()


@pytest.mark.parametrize('model, batches, words', [
    (lambda: nn.Linear(6, 6), tokens(3, 6), 'model: Linear has no norm'),
    (pair, [], 'batches: there is none'),
    (pair, ['image.jpg'], 'batches: a batch must be a tensor .* got str'),
    (pair, [tokens(3, 6), tokens(3, 6) / 0], 'the input of 1 is not finite'),
])
def test_errors(model, batches, words):
    model = model()
    before = copy.deepcopy(model)
    with pytest.raises(ConversionError, match=words):
        update_norms(model, batches)
    assert_same(model, before)
    assert not any(module._forward_pre_hooks for module in model.modules())
