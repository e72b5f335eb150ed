"""Replacements of features of torch that an old release lacks."""
import pytest
import torch
from torch.nn import functional as F

from mmunorm import compat


def test_in_backward_pass():
    found = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda dx: found.append(compat.in_backward_pass()))
    x.sum().backward()
    assert found == [True] and not compat.in_backward_pass()


@pytest.mark.parametrize('weighted', [False, True])
def test_rms_norm_without_torchs_own(monkeypatch, weighted):
    x, weight = torch.randn(3, 5, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64) if weighted else None
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 if weight is None else weight)
    torch.testing.assert_close(compat.rms_norm(x, weight, 1e-5), expected)
    monkeypatch.delattr(F, 'rms_norm', raising=False)
    torch.testing.assert_close(compat.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize('name', ['recompile_limit', 'cache_size_limit'])
def test_the_limit_of_recompilations_is_only_raised(monkeypatch, name):
    class Config:
        pass

    setattr(Config, name, 8)
    monkeypatch.setattr(torch._dynamo, 'config', Config)
    for number, limit in ((4, 8), (64, 64), (16, 64)):
        compat.allow_recompilations(number)
        assert vars(Config)[name] == limit
