"""Pairs of sentences: found in pairs of paragraphs, and split for training and testing."""
from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

Pair = tuple[str, str]

N = 5  # words that are compared at once
LEAST_WORDS = N + 2  # a test sentence has at least three such groups
# Of 100 sources; the others are for training.
TEST, VALID = 3, 1

# A sentence may start with a capital letter, a number, or one of these after a quotation mark or bracket.
_SENTENCE_END = re.compile(r'(?<=[.!?])\s+(?=["\'«„(]?[^\W_a-zß-ÿ])')


class SplitText(NamedTuple):
    """Pairs for training, validation and test; and how many sentences the test set was chosen from."""
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    test_candidates: int


def sentence_pairs(a: str, b: str) -> list[Pair]:
    """The sentences of two texts, one the translation of the other; none where they are not equally many."""
    sentences = [_SENTENCE_END.split(' '.join(text.split())) for text in (a, b)]
    return list(zip(*sentences, strict=True)) if len(sentences[0]) == len(sentences[1]) else []


def is_translation(pair: Pair) -> bool:
    """Whether the sides of a pair have letters, differ, and are not more than three times as long as each other."""
    # Places that nobody has translated yet are marked.
    if pair[0] == pair[1] or '<trans>' in pair[1] or not all(re.search(r'[^\W\d_]{2}', side) for side in pair):
        return False
    lengths = sorted(map(len, pair))
    return lengths[1] <= 3 * lengths[0] + 10


def split_text(text: Iterable[tuple[str, Pair]]) -> SplitText:
    """Splits pairs by where they come from, and removes duplicates.

    The name of a source, such as a package, decides, so that it stays on its side when others come and go. A pair of
    another side is not in the validation set. The test set has sentences of 7 words or more, each once, of whose groups
    of 5 words at most half occur in training.

    Args:
        text: sources and pairs. The first side of a pair is the one whose words are compared.
    """
    train, valid, test = {}, {}, {}
    for source, pair in text:
        part = zlib.crc32(source.encode()) % 100
        (test if part < TEST else valid if part < TEST + VALID else train)[pair] = None
    # Hashes take a tenth of the memory of words.
    seen = {hash(group) for first, _ in train for group in _groups(first)}
    candidates = {first: second for first, second in test if len(_words(first)) >= LEAST_WORDS}
    chosen = []
    for pair in candidates.items():
        groups = [hash(group) in seen for group in _groups(pair[0])]
        if 2 * sum(groups) <= len(groups):
            chosen.append(pair)
    valid = [pair for pair in valid if pair not in train and pair not in test]
    return SplitText(list(train), valid, chosen, len(candidates))


def _words(text: str) -> list[str]:
    return re.findall(r'\w+', text.lower())


def _groups(text: str) -> Iterator[tuple[str, ...]]:
    words = _words(text)
    return zip(*(words[i:] for i in range(N)), strict=False)
