"""Measures time of several functions in rotation, peak memory, norm calls, FLOPs and differences of outputs."""
from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from ..deploy.graph import norms_left

BUDGET_SECONDS, ROUNDS = 45, (5, 100)  # by default, as many rounds as fit in this time, within these bounds


class InterleavedTimer:
    """Runs several functions without arguments, by name, in rotation.

    `clock` returns the time in seconds; with None, each function returns its duration.
    """

    def __init__(self, runs: dict[str, Callable], device: torch.device,
                 clock: Callable[[], float] | None = time.perf_counter):
        self.runs, self.device, self.clock = runs, device, clock

    def seconds(self, name: str) -> float:
        if self.clock is None:
            return self.runs[name]()
        _synchronize(self.device)
        start = self.clock()
        self.runs[name]()
        _synchronize(self.device)
        return self.clock() - start

    def time(self, rounds: int | None = None, title: str | None = None) -> dict[str, list[float]]:
        """The seconds of all runs, by name; `title` is that of a progress bar.

        Each round runs them in rotating order that is shuffled after each full rotation, so that noise affects all
        equally, and none always follows the same other one in memory and caches.
        """
        seconds = {name: [] for name in self.runs}
        order, generator = list(self.runs), random.Random(0)
        start, most = time.perf_counter(), (rounds or ROUNDS[1]) if order else 0
        for i in tqdm(range(most), desc=title, unit='round', disable=None if title else True):
            if rounds is None and i >= ROUNDS[0] and time.perf_counter() - start > BUDGET_SECONDS:
                break
            first = i % len(order)
            if i and first == 0:
                generator.shuffle(order)
            for name in order[first:] + order[:first]:
                seconds[name].append(self.seconds(name))
        return seconds


def ratio(seconds: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Ratio of times in a round: the median `value` and the quartiles `low` and `high`."""
    low, value, high = np.percentile(np.array(seconds) / np.array(others), (25, 50, 75)).tolist()
    return dict(value=value, low=low, high=high)


def speed(seconds: Sequence[float], batch_size: int) -> dict[str, dict[str, float]]:
    """`throughput` (images/s) and `latency_ms` of batches, each with `median` and the quartiles `low` and `high`."""
    seconds = np.array(seconds)
    return {name: dict(zip(('low', 'median', 'high'), np.percentile(values, (25, 50, 75)).tolist(), strict=True))
            for name, values in dict(throughput=batch_size / seconds, latency_ms=1000 * seconds).items()}


def _synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def peak_memory(run: Callable, device: torch.device) -> int:
    """The largest number of bytes that `run` needs beyond what is allocated before it, by torch's allocators.

    On a CPU, torch's profiler does not see libraries with an allocator of their own.
    """
    if device.type == 'cuda':
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # hides messages about the profiler's start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    # In temporal order; freed memory has a negative size.
    sizes = (event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == '[memory]')
    return max(accumulate(sizes, initial=0))


def size_in_memory(tensors: Iterable[Tensor]) -> int:
    """Size of the storages of tensors in bytes, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def plain_attention() -> Iterator[None]:
    """Within it, `scaled_dot_product_attention` takes matrix products, or a GPU's memory-efficient kernel."""
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)


def count(model: nn.Module, run: Callable) -> tuple[int, int, int]:
    """Calls of norms, calls of what is left of folded LayerNorms, and FLOPs of one run.

    FLOPs count matrix products and convolutions, two per multiply-add.
    """
    (norms, plain), calls = norms_left(model), []
    # torch counts nothing for a CPU's flash attention.
    with ExitStack() as hooks, plain_attention(), FlopCounterMode(display=False) as flops:
        for name in norms + plain:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(
                lambda *_, name=name: calls.append(name in norms)))
        run()
    return sum(calls), len(calls) - sum(calls), flops.get_total_flops()


def largest_difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """The largest absolute difference, the largest absolute value of `expected`, and their quotient."""
    pairs = [(a.double(), b.double()) for a, b in zip(outputs, expected, strict=True)]
    absolute = max(float((a - b).abs().max()) for a, b in pairs)
    largest = max(float(b.abs().max()) for _, b in pairs)
    return dict(absolute=absolute, largest_output=largest, relative=absolute / largest if largest else absolute)
