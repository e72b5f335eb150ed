"""UN's own averages over steps beside plain torch; of numpy for test_host.py, of Triton for triton_cases.py."""
import copy

import torch

from mmunorm.norms import UN

# Channels and window.
SIZES = [(1, 1), (3, 4), (96, 4), (130, 1), (7, 9)]


def same_state(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            # Of a log of huge numbers. On a CPU decisions are bools.
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=5e-5, atol=1e-6)


def check_averages(channels, window, filtered, centered, huge, device='cpu'):
    """Eight steps of UN by its own kernels and in plain torch: in warm-up, averaged, not finite, with an outlier."""
    plain = UN(channels, window=window, warmup_iters=2, outlier_filter=filtered, centered=centered).to(device)
    plain.unsettled = 2
    launched = copy.deepcopy(plain)
    plain.has_own_kernels = False
    generator = torch.Generator().manual_seed(channels)
    for t in range(1, 9):
        measured = (torch.rand(1 + centered, channels, generator=generator) + .5).to(device)
        g, scale = (torch.randn(channels, generator=generator).abs().clamp(max=3).to(device) for _ in range(2))
        if huge:  # sums of such overflow
            measured, g = measured * 1e38, g * 1e38
        if t == 4:
            measured[0, 0], measured[0, -1] = float('nan'), float('inf')
        if t in (2, 5):
            g[0] = float('inf')
        if t == 7 and not huge:
            measured[0, 0] = 1e6
        tokens = torch.tensor(9, device=device) if t % 2 else 9
        scales = None if t % 3 else torch.tensor(4., device=device)
        results = []
        for norm in (plain, launched):
            norm.loss_scale = scales
            step = norm._average_activation(measured, None)
            mean = torch.ones_like(g) if centered else None
            terms = norm._gradient_terms(step, g, g, tokens, scale, step.rstd, mean)
            results.append((step.rstd, step.averaged, step.outlier, step.mean, *terms))
        same_state(*results)
        same_state(plain.buffers(), launched.buffers())
    assert all(buffer.isfinite().all() for buffer in launched.buffers())
    if filtered and 1 < window < 9 and channels > 1 and not huge:
        assert plain.num_outliers > 0
