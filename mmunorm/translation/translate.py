"""Lines of text to lines of text."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from .model import TranslationModel
from .text.ids import EOS, PAD

if TYPE_CHECKING:
    from .text.subwords import Subwords

# Lines that are sorted by length together.
_CHUNK = 2000


def translate_lines(model: TranslationModel, subwords: Subwords, lines: Iterable[str],
                    batch_tokens: int) -> Iterator[list[tuple[float, str]]]:
    """Gives of each line its hypotheses, score and text, the best first; none for an empty line.

    Args:
        model: in eval mode.
        subwords: of the text that it was trained on.
        lines: sentences. They are read as they are needed.
        batch_tokens: at most so many tokens of sources in a batch, padding counted, except for one long sentence.
    """
    lines = iter(lines)
    device = next(model.parameters()).device
    while chunk := list(islice(lines, _CHUNK)):
        ids = [torch.tensor([*subwords.encode(line), EOS]) for line in chunk]
        found: list[list[tuple[float, str]]] = [[] for _ in chunk]
        for batch in _batches([len(each) for each in ids], batch_tokens):
            batch = [i for i in batch if len(ids[i]) > 1]
            if not batch:
                continue
            source = pad_sequence([ids[i] for i in batch], batch_first=True, padding_value=PAD).to(device)
            for i, hypotheses in zip(batch, model.translate(source), strict=True):
                found[i] = [(score, subwords.decode(words)) for score, words in hypotheses]
        yield from found


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of sentences of similar lengths, the longest first."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    yield batch
