"""Typing errors to test the robustness of translation: kinds of noise of arXiv 1711.02173, and similar ones."""
from __future__ import annotations

import random
import re
from collections.abc import Sequence

from .lines import language_token

_WORD = re.compile(r'[^\W\d_]{2,}')
_KEYBOARD = ('qwertyuiop', 'asdfghjkl', 'zxcvbnm')
_NEIGHBOURS = {key: row[max(0, i - 1):i] + row[i + 1:i + 2] for row in _KEYBOARD for i, key in enumerate(row)}


def _swap(word: str, rng: random.Random) -> str:
    i = rng.randrange(len(word) - 1)
    return word[:i] + word[i + 1] + word[i] + word[i + 2:]


def _drop(word: str, rng: random.Random) -> str:
    i = rng.randrange(len(word))
    return word[:i] + word[i + 1:]


def _double(word: str, rng: random.Random) -> str:
    i = rng.randrange(len(word))
    return word[:i] + word[i] + word[i:]


def _keyboard(word: str, rng: random.Random) -> str:
    i = rng.randrange(len(word))
    # Letters that are not on the keyboard stay.
    return word[:i] + rng.choice(_NEIGHBOURS.get(word[i].lower(), word[i])) + word[i + 1:]


def _case(word: str, rng: random.Random) -> str:
    return word.swapcase()


# Two neighbouring letters are swapped, a letter is dropped, doubled, or replaced by that of a neighbouring key, or the
# case of the word is inverted.
KINDS = dict(swap=_swap, drop=_drop, double=_double, keyboard=_keyboard, case=_case)


def add_noise(line: str, share: float, kinds: Sequence[str], rng: random.Random) -> str:
    """A line with errors.

    Args:
        line: a sentence. A language token at its start is kept.
        share: probability of an error in each word of at least two letters.
        kinds: the kinds of errors from `KINDS`.
        rng: source of randomness.
    """
    token = language_token(line)
    return token + _WORD.sub(lambda word: KINDS[rng.choice(kinds)](word[0], rng) if rng.random() < share else word[0],
                             line.removeprefix(token))
