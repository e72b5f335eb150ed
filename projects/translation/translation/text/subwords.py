"""Subwords by sentencepiece."""
from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from mmunorm.deploy.formats.base import need
from mmunorm.utils import PreflightError, whole_file

from .ids import BOS, EOS, PAD, UNK
from .lines import language_token, read_lines

SPECIALS = dict(pad=PAD, unk=UNK, bos=BOS, eos=EOS)
# Fixed on all machines, because the subwords' ids depend on it.
TRAINING_THREADS = 16
_TRAIN = 'train one with `python projects/translation/tools/train_subwords.py`'


class Subwords:
    """A subword model, one for both languages. `len()` is the size of its vocabulary.

    Args:
        path (str | os.PathLike): model file of sentencepiece, with pad, unk, bos and eos as the ids 0 to 3.

    Raises:
        PreflightError: sentencepiece is missing, or the file is missing, of another kind, or has other ids.
    """

    def __init__(self, path: str | os.PathLike):
        need('sentencepiece')
        from sentencepiece import SentencePieceProcessor
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise PreflightError(f'cannot read the subword model {path}: {error.strerror}; {_TRAIN}.') from error
        self._processor = SentencePieceProcessor()
        with suppress(RuntimeError):
            self._processor.LoadFromSerializedProto(content)
        if len(self._processor) == 0:
            raise PreflightError(f'{path} is not a sentencepiece model; {_TRAIN}.')
        ids = {name: getattr(self._processor, f'{name}_id')() for name in SPECIALS}
        if ids != SPECIALS:
            raise PreflightError(f'{path} has the special ids {ids} instead of {SPECIALS}; {_TRAIN}.')
        self.digest = hashlib.sha256(content).hexdigest()

    def __len__(self) -> int:
        return len(self._processor)

    def encode(self, text: str | list[str]) -> list[int] | list[list[int]]:
        """The ids of a sentence, or of several, without special tokens at the ends; uses torch's number of threads."""
        return self._processor.encode(text, num_threads=torch.get_num_threads())

    def decode(self, ids: Sequence[int]) -> str:
        """The sentence of ids, which have no special tokens except unk."""
        return self._processor.decode([int(i) for i in ids])


def check_vocabulary(subwords: int, model: int) -> None:
    """Checks that a model's number of embeddings, its `vocab_size`, is the number of subwords.

    Raises:
        PreflightError: the numbers differ.
    """
    if subwords != model:
        raise PreflightError(f'the subword model has {subwords} subwords, but the model {model} embeddings: use the '
                             f'subwords that it was trained with, or set vocab_size={subwords} and train again.')


def train_subwords(texts: Sequence[str | os.PathLike], path: str | os.PathLike, vocab_size: int = 8000,
                   model_type: str = 'unigram') -> None:
    """Trains one subword model on all texts together, and writes it to `path`.

    Rare characters are encoded as bytes, 256 of the subwords, so any text can be decoded, except for white space and
    sentencepiece's Unicode normalization. A language token at the start of a line is one subword. If there are more
    than 4 million lines, it samples 4 million.

    Args:
        texts: files with one sentence per line.
        path: the model file.
        vocab_size: number of subwords, including the four special ones.
        model_type: 'unigram' or 'bpe'.

    Raises:
        PreflightError: sentencepiece is missing, a text cannot be used, or `vocab_size` does not fit it.
    """
    need('sentencepiece')
    from sentencepiece import SentencePieceTrainer
    # First, because sentencepiece hides errors while reading.
    tokens = {language_token(line) for text in texts for line in read_lines(text)}
    if not tokens:
        raise PreflightError(f'{", ".join(map(str, texts))}: no text.')
    with whole_file(path) as part:
        try:
            with open(part, 'wb') as file:
                SentencePieceTrainer.train(
                    sentence_iterator=(line for text in texts for line in read_lines(text)), model_writer=file,
                    vocab_size=vocab_size, model_type=model_type, input_sentence_size=4_000_000,
                    max_sentence_length=1_000_000,  # bytes; longer lines are silently dropped
                    byte_fallback=True, num_threads=TRAINING_THREADS, minloglevel=2,
                    # With sentencepiece's word prefix, which would otherwise be a separate subword.
                    user_defined_symbols=[f'▁{token}' for token in sorted(tokens - {''})],
                    **{f'{name}_id': i for name, i in SPECIALS.items()})
        except RuntimeError as error:
            # The reason is between the location in sentencepiece's source and an option that this function lacks.
            reason = str(error).strip().splitlines()[-1].rpartition('] ')[2].partition(' or decrease')[0]
            raise PreflightError(f'no {vocab_size} subwords can be trained on {", ".join(map(str, texts))}: '
                                 f'{reason.rstrip(".")}.') from error
