import pytest
import torch

from mmunorm.norms import kernels
from mmunorm.norms.kernels import cpu, reference

SHAPES = [(1, 1), (7, ), (3, 5, 7), (2, 49, 96), (16, 784, 24), (2999, 96), (5, 2000)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def draw(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours, theirs, dtype):
    """`theirs` in float64; errors are measured beside the largest value."""
    rounding = 1e-12 if dtype == torch.float64 else 5e-6
    scale = max(1e-30, float(theirs.abs().max()))
    torch.testing.assert_close(ours.double(), theirs, rtol=rounding, atol=rounding * scale)


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('centered', [False, True])
@pytest.mark.parametrize('masked', [False, True])
def test_equals_the_reference_in_float64(shape, dtype, centered, masked):
    x, dy = draw(shape, dtype) * 2 + 1, draw(shape, dtype, 1)
    statistics = reference.statistics_dtype(dtype)
    weight, rstd, psi, g_mean, mean = (draw(shape[-1:], statistics, seed) for seed in range(2, 7))
    eta = draw((1, ), statistics, 8) if centered else None
    mean, g_mean = (mean, g_mean) if centered else (None, None)
    valid = None
    if masked:
        valid = draw(shape[:-1], seed=9) < 0.5
        valid.view(-1)[0] = True

    def exact(*tensors):
        return [tensor.double() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor
                for tensor in tensors]

    assert_close(cpu.second_moment(x, valid), reference.second_moment(*exact(x, valid)), dtype)
    for ours, theirs in zip(cpu.variance_and_mean(x, valid), reference.variance_and_mean(*exact(x, valid)),
                            strict=True):
        assert ours.dtype == statistics
        assert_close(ours, theirs, dtype)
    args = dy, x, weight, rstd, mean, valid
    size = float((dy.double() * (x.double().abs() + 2)).abs().sum())  # of what cancels
    for ours, theirs in zip(cpu.normalize_backward(*args), reference.normalize_backward(*exact(*args)),
                            strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == statistics
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6 * size / shape[-1] ** .5)
    args = dy, x, weight, rstd, psi, mean, g_mean, eta, valid
    torch.testing.assert_close(cpu.normalize_input_gradient(*args), reference.normalize_input_gradient(*args))
    with torch.no_grad():
        torch.testing.assert_close(cpu.normalize_forward(x, weight, rstd),
                                   reference.normalize_forward(x, weight, rstd))


def test_sums_over_many_tokens_keep_their_precision():
    """One float32 addition after the other loses a digit more."""
    x = draw((50176, 96)).abs() + 1
    exact = reference.second_moment(x.double())
    assert ((kernels.second_moment(x).double() - exact).abs() / exact).max() < 1e-6
    _, dbias, _, _ = kernels.normalize_backward(x, x, torch.ones(96), torch.ones(96))
    exact = x.double().sum(0)
    assert ((dbias.double() - exact).abs() / exact).max() < 1e-6


def test_makes_no_large_temporary():
    """Beside its result, the input gradient needs a small part of it."""
    x, dy, c = draw((2, 20000, 96)), draw((2, 20000, 96)), torch.ones(96)
    cpu_only = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu_only, profile_memory=True) as profiler:
        kernels.second_moment(x)
        kernels.normalize_backward(dy, x, c, c)
        kernels.normalize_input_gradient(dy, x, c, c, c)
    sizes = sorted(event.nbytes() for event in profiler.profiler.kineto_results.events()
                   if event.name() == '[memory]' and event.nbytes() > 0)
    assert sizes[-1] == x.nbytes and sum(sizes[:-1]) < x.nbytes / 2


def test_strided_input_gives_the_same_as_dense():
    x, c = draw((5, 6, 9)).transpose(1, 2), torch.ones(6)
    torch.testing.assert_close(kernels.second_moment(x), kernels.second_moment(x.contiguous()))
    torch.testing.assert_close(kernels.normalize_backward(x, x, c, c)[0],
                               kernels.normalize_backward(x.contiguous(), x.contiguous(), c, c)[0])


def test_the_forward_map_is_differentiable():
    x, scale, shift = draw((4, 3)).double(), draw(3).double(), draw(3).double()
    inputs = [value.requires_grad_() for value in (x, scale, shift)]
    assert torch.autograd.gradcheck(kernels.normalize_forward, inputs)
    half = draw((4, 3), torch.bfloat16).requires_grad_()
    kernels.normalize_forward(half, scale.float(), shift.float()).sum().backward()
    assert half.grad.dtype == torch.bfloat16


def test_no_tokens():
    x, c = torch.zeros(0, 5), torch.ones(5)
    assert kernels.second_moment(x).isnan().all()
    assert (kernels.normalize_backward(x, x, c, c)[0] == 0).all()
    assert kernels.normalize_input_gradient(x, x, c, c, c).shape == (0, 5)


@pytest.mark.parametrize('shape', [(5, ), (1, 5), (31, 5), (2, 32, 5), (2, 7, 7, 5), (0, 5)], ids=str)
@pytest.mark.parametrize('dynamic', [False, True])
def test_compiled_sums_over_any_number_of_tokens(shape, dynamic):
    torch._dynamo.reset()
    x, dy, c = draw(shape, torch.float64), draw(shape, torch.float64, seed=1), draw(5, torch.float64)

    def sums(x, dy):
        return reference.second_moment(x), reference.normalize_backward(dy, x, c, c)

    compiled = torch.compile(sums, backend='aot_eager', fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x, dy), sums(x, dy), equal_nan=True)
