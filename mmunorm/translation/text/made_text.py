"""Makes a folder of parallel text from Debian's translated package descriptions."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ...datasets.made_folder import is_made, making_folder
from ...utils import PreflightError, check_installed
from .apt import OWN_TEXT, fetched_lists
from .debian import descriptions, parallel_text, source_packages
from .pairs import Pair, SplitText, split_text
from .subwords import train_subwords

LANGUAGES = ('it', 'da', 'fr')  # of those that Debian has, the ones that were tried


def make_translation(out: str | os.PathLike, language: str, vocab_size: int = 4000, force: bool = False,
                     say: Callable[[str], None] = lambda message: None) -> SplitText | None:
    """Writes `train`, `valid` and `test`, each as `.src` in English and `.tgt`, and `subwords.model` of both.

    The text is package descriptions from the package sources of this system. It is split by :func:`split_text`.

    Args:
        out: the folder, made whole or not at all.
        language: of the translations, one of `LANGUAGES`.
        vocab_size: subwords, with the four special ones.
        force: whether to overwrite a folder that was made before.
        say: is told what happens next.

    Returns:
        SplitText | None: what was written; None if it was there.

    Raises:
        PreflightError: apt or sentencepiece is missing, or apt does not have the text.
        FolderError: the folder must not be written.
    """
    check_installed('sentencepiece', 'subwords', 'translate')
    settings = dict(pair=f'en-{language}', vocab_size=vocab_size)
    if is_made(out, settings, force):
        return None
    say('fetching package descriptions, 20 MB')
    with fetched_lists(language) as apt:
        say('pairing sentences')
        split = split_text(parallel_text(descriptions(apt.lines('*_Translation-en*'), 'en'),
                                         descriptions(apt.lines(f'*_Translation-{language}*'), language),
                                         source_packages(apt.lines('*_Packages*'))))
    parts = dict(train=split.train, valid=split.valid, test=split.test)
    empty = [name for name, pairs in parts.items() if not pairs]
    if empty:
        raise PreflightError(f'the package sources of this system have too little text for {empty[0]}; '
                             f'{OWN_TEXT}.')
    with making_folder(out, settings, force) as folder:
        for name, pairs in parts.items():
            _write(folder / name, pairs)
        say('training subwords, one or two minutes')
        train_subwords([folder / 'train.src', folder / 'train.tgt'], folder / 'subwords.model', vocab_size)
    return split


def _write(path: Path, pairs: Iterable[Pair]) -> None:
    for suffix, side in zip(('.src', '.tgt'), zip(*pairs, strict=True), strict=True):
        path.with_suffix(suffix).write_text(''.join(f'{line}\n' for line in side), encoding='utf-8', newline='\n')
