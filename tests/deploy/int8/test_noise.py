import pytest
import torch

from mmunorm.deploy.int8 import noise


def test_a_bit_more_is_six_decibels():
    generator = torch.Generator().manual_seed(0)
    tokens, weight = torch.rand(4000, 16, generator=generator) - 0.5, torch.randn(24, 16, generator=generator)
    ratios = [noise.signal_to_noise(tokens, weight, bits) for bits in (6, 7, 8)]
    assert [b - a for a, b in zip(ratios, ratios[1:], strict=False)] == pytest.approx([6.02] * 2, abs=0.5)


def test_one_large_channel_costs_the_others():
    generator = torch.Generator().manual_seed(0)
    tokens, weight = torch.randn(4000, 16, generator=generator), torch.randn(24, 16, generator=generator)
    size = torch.ones(16)
    size[3] = 100
    alike = noise.signal_to_noise(tokens, weight, 8)
    assert noise.signal_to_noise(tokens * size, weight / size, 8) < alike - 25


@pytest.mark.parametrize('low, high', [(-1., 3.), (0.5, 2.), (-3., -1.), (0., 0.)])
def test_zero_is_a_level(low, high):
    x = torch.linspace(-4, 4, 101)
    x[50] = 0
    rounded = noise.quantize(x, low, high, 4)
    assert rounded[50] == 0 and len(rounded.unique()) <= 16
    assert rounded.max() <= max(high, 0) + 0.3 and rounded.min() >= min(low, 0) - 0.3


def test_weights_are_symmetric_and_each_output_has_its_range():
    weight = torch.randn(3, 50) * torch.tensor([[1.], [1000.], [0.]])
    rounded = noise.quantize_weight(weight, 8)
    assert ((rounded - weight).abs().amax(1) <= weight.abs().amax(1) / 254 + 1e-9).all()
    torch.testing.assert_close(noise.quantize_weight(-weight, 8), -rounded, rtol=0, atol=1e-30)


def test_tails_are_cut_off():
    x = torch.linspace(0, 1, 1001)[torch.randperm(1001)]
    assert noise.value_range(x, 0.) == (0, 1)
    assert noise.value_range(x, 0.01) == pytest.approx((0.01, 0.99))
