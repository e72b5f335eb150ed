"""The passes in plain torch: precision, odd input, and the compiler's sums."""
from unittest import mock

import pytest
import torch

from mmunorm.norms import UN, kernels
from mmunorm.norms.kernels import reference


def draw(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_sums_over_many_tokens_keep_their_precision():
    """Sequential float32 additions lose one more digit."""
    x = draw((50176, 96)).abs() + 1
    exact = reference.second_moment(x.double())
    assert ((reference.second_moment(x).double() - exact).abs() / exact).max() < 1e-6
    _, dbias, _, _ = reference.gradient_sums(x, x, torch.ones(96))
    exact = x.double().sum(0)
    assert ((dbias.double() - exact).abs() / exact).max() < 1e-6


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    x, scale, shift = draw((50, 7), dtype), draw(7, seed=1), draw(7, seed=2)
    exact = scale.double() * x.double() + shift.double()
    assert torch.equal(reference.affine(x, scale, shift), exact.float().to(dtype))
    assert reference.second_moment(x * 300).dtype == torch.float32


@pytest.mark.parametrize('shape, dynamic', [((5, ), False), ((31, 5), True), ((2, 7, 7, 5), True), ((0, 5), False)])
def test_compiled_sums_over_any_number_of_tokens(shape, dynamic):
    torch._dynamo.reset()
    x, dy, c = draw(shape, torch.float64), draw(shape, torch.float64, seed=1), draw(5, torch.float64)

    def sums(x, dy):
        return reference.second_moment(x), reference.gradient_sums(dy, x, c, c)

    compiled = torch.compile(sums, backend='aot_eager', fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x, dy), sums(x, dy), equal_nan=True)


def test_a_step_on_a_cpu_does_not_import_triton():
    with mock.patch.object(kernels, 'triton_kernels', side_effect=AssertionError):
        UN(5)(draw((3, 5))).sum().backward()
