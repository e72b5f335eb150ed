"""The per-channel part in NumPy and in torch: a CPU takes the one, a GPU and a compiled graph the other."""
import pytest
import torch

from mmunorm.norms import MABN, PN, UN, host

from .test_un import ABLATIONS, random_affine, sequence

NORMS = [(UN, dict(kwargs, window=(3, 4))) for kwargs in ABLATIONS] + [
    (UN, dict(window=1)), (UN, dict(outlier_variance='channel')), (MABN, dict(window=3)), (PN, dict())]


@pytest.mark.parametrize('cls,kwargs', NORMS, ids=lambda value: str(getattr(value, '__name__', value)))
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_both_compute_the_same(cls, kwargs, dtype, monkeypatch):
    results = []
    for in_numpy in (True, False):
        with monkeypatch.context() as patch:
            if not in_numpy:
                patch.setattr(host, 'takes', lambda *tensors: False)
            norm = random_affine(cls(6, warmup_iters=8, alpha=0.8, **kwargs)).to(dtype)
            history = []
            for t, x, dy in sequence(60, 6, outlier_every=9):
                tx, tdy = (torch.from_numpy(value).to(dtype) for value in (x, dy))
                if t % 11 == 0:
                    tx[3, 2] = float('inf')
                if t % 13 == 0:
                    tdy[3, 2] = float('nan')
                tx.requires_grad_()
                norm.zero_grad()
                y = norm(tx)
                y.backward(tdy)
                history += [y.detach(), tx.grad, *(value.clone() for value in norm.state_dict().values())]
        results.append(history)
    tol = dict(rtol=1e-10, atol=1e-10) if dtype == torch.float64 else dict(rtol=2e-4, atol=2e-4)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tol)
    if kwargs.get('outlier_filter') and kwargs['window'] != 1:
        assert norm.num_outliers > 0


@pytest.mark.parametrize('tensor,taken', [
    (torch.ones(2), True), (torch.ones(2, dtype=torch.float64), True),
    (torch.ones(2, dtype=torch.bfloat16), False), (torch.ones(2, device='meta'), False),
    (torch.nn.Parameter(torch.ones(2)), False)])
def test_takes_ordinary_cpu_tensors(tensor, taken):
    assert host.takes(tensor) == taken
