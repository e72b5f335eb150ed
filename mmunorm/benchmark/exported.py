"""Files of :func:`mmunorm.export` beside each other."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..deploy.api import compare
from ..deploy.formats import format_of
from ..deploy.runtime import ExportedModel
from ..tables import markdown_table
from .measure import InterleavedTimer


def compare_files(files: Mapping[str, str | Path], model: nn.Module, images: Tensor | Iterable[Tensor],
                  threads: int | None = None, rounds: int | None = None) -> str:
    """Files of one model, such as with LayerNorm and with these folded, beside each other.

    Args:
        files: paths by the name of their row, the baseline first.
        model (nn.Module): the model before it was folded.
        images: a batch, or an iterable of batches, as the model takes them, for the SNR.
        threads (int, optional): CPU threads. Defaults to each runtime's choice.
        rounds (int, optional): each runs every file on one batch. Defaults to as many as fit in 45 seconds.

    Returns:
        A table in Markdown: the median milliseconds of a batch, how many times faster than the first file, the SNR of
            each output in dB, and megabytes.
    """
    images = images if isinstance(images, Tensor) else [*images]
    snr = {name: compare(path, model, images).snr for name, path in files.items()}
    runs = {}
    for name, path in files.items():
        file = ExportedModel(path, threads)
        runs[name] = partial(file, np.random.default_rng(0).uniform(0, 1, file.meta['shape']).astype(np.float32))
    timer = InterleavedTimer(runs, torch.device('cpu'))
    timer.time(2)
    seconds, first = timer.time(rounds), next(iter(files))
    rows = []
    for name, path in files.items():
        size = sum(file.stat().st_size for file in format_of(path).files(Path(path)))
        rows.append([name, f'{1000 * np.median(seconds[name]):.1f}',
                     '' if name == first else f'{np.median(seconds[first]) / np.median(seconds[name]):.2f}',
                     ', '.join(f'{value:.1f}' for value in snr[name].values()), f'{size / 1e6:.1f}'])
    return '\n'.join(markdown_table(['file', 'ms', f'x {first}', 'SNR, dB', 'MB'], rows))
