"""Measures time of several functions in rotation, peak memory, norm calls, FLOPs and differences of outputs."""
from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from ..deploy.graph import norms_left

# By default, there are as many rounds as fit in this time, within these bounds.
BUDGET_SECONDS = 45
ROUNDS = (5, 100)


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
        equally, and none always follows the same other one in memory and caches. By default, there are as many rounds
        as fit in 45 seconds, from 5 to 100.
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
    def spread(values: np.ndarray) -> dict[str, float]:
        return dict(zip(('low', 'median', 'high'), np.percentile(values, (25, 50, 75)).tolist(), strict=True))

    seconds = np.array(seconds)
    return dict(throughput=spread(batch_size / seconds), latency_ms=spread(1000 * seconds))


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
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        run()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == '[memory]':  # in temporal order; freed memory has a negative size
            live += event.nbytes()
            peak = max(peak, live)
    return peak


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
    norms, plain = norms_left(model)
    calls = []
    hooks = [model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name in norms))
             for name in norms + plain]
    # torch counts nothing for a CPU's flash attention.
    try:
        with plain_attention(), FlopCounterMode(display=False) as flops:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(calls), len(calls) - sum(calls), flops.get_total_flops()


def largest_difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """The largest absolute difference, the largest absolute value of `expected`, and their quotient."""
    pairs = [(a.double(), b.double()) for a, b in zip(outputs, expected, strict=True)]
    absolute = max(float((a - b).abs().max()) for a, b in pairs)
    largest = max(float(b.abs().max()) for _, b in pairs)
    return dict(
        absolute=absolute, largest_output=largest, relative=absolute / largest if largest else absolute)
