"""Translates lines of text."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch.nn.utils.rnn import pad_sequence

from .model import TranslationModel
from .text import EOS, PAD, Subwords

# The number of lines that are sorted by length together.
_CHUNK = 2000


def translate_lines(model: TranslationModel, subwords: Subwords, lines: Iterable[str],
                    batch_tokens: int) -> Iterator[list[tuple[float, str]]]:
    """Yields the hypotheses of each line, score and text, the best first; none for an empty line.

    Args:
        model: a model in eval mode.
        subwords: the subwords of its training text.
        lines: sentences, read lazily.
        batch_tokens: maximum number of source tokens in a batch, including padding, except for one long sentence.
    """
    lines = iter(lines)
    device = next(model.parameters()).device
    while chunk := list(islice(lines, _CHUNK)):
        ids = [torch.tensor([*subwords.encode(line), EOS]) for line in chunk]
        found: list[list[tuple[float, str]]] = [[] for _ in chunk]
        # The longest first, because it determines the batch size.
        waiting = sorted((i for i in range(len(ids)) if len(ids[i]) > 1), key=lambda i: -len(ids[i]))
        while waiting:
            count = max(1, batch_tokens // len(ids[waiting[0]]))
            batch, waiting = waiting[:count], waiting[count:]
            source = pad_sequence([ids[i] for i in batch], batch_first=True, padding_value=PAD).to(device)
            for i, hypotheses in zip(batch, model.translate(source), strict=True):
                found[i] = [(score, subwords.decode(words)) for score, words in hypotheses]
        yield from found
