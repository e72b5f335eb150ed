"""Makes a folder of parallel text from translated Debian package descriptions."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from mmunorm.deploy.formats.base import need
from mmunorm.utils import PreflightError
from projects.digits.digits.atomic_folder import atomic_folder, is_complete
from projects.photographs.photographs.apt import fetched_lists

from .debian import SplitText, descriptions, parallel_text, source_packages, split_text
from .subwords import train_subwords

LANGUAGES = ('it', 'da', 'fr', 'de')  # the tested ones of Debian's
HINT = ("bring your own text instead, as train.src, train.tgt and the like: plain text, one sentence a line; "
            '`python projects/translation/tools/train_subwords.py` makes the subwords')


def make_translation(out: str | os.PathLike, languages: Sequence[str], vocab_size: int = 4000, force: bool = False,
                     log: Callable[[str], None] = lambda message: None) -> SplitText | None:
    """Writes `train`, `valid` and `test`, each as `.src` in English and `.tgt`, and `subwords.model` of both.

    The text is package descriptions from the package sources of this system. It is split by :func:`split_text`. With
    several languages, each file has the pairs of all, and a source begins with its :func:`language_token`.

    Args:
        out: the folder, written atomically.
        languages: languages of the translations, distinct and from `LANGUAGES`.
        vocab_size: number of subwords, including the four special ones.
        force: whether to overwrite a folder that this function created.
        log: called with a description of each step.

    Returns:
        SplitText | None: the written text; None if it exists.

    Raises:
        PreflightError: apt or sentencepiece is missing, or apt cannot get the text.
        FolderError: the folder must not be overwritten.
    """
    need('sentencepiece')
    settings = dict(pair='-'.join(['en', *languages]), vocab_size=vocab_size)
    if is_complete(out, settings, force):
        return None
    log('fetching package descriptions, 20 MB')
    with fetched_lists(('en', *languages), 'the text', HINT) as apt:
        translated = {language: apt.lines(f'*_Translation-{language}*', f'descriptions in the language {language!r}')
                      for language in languages}
        log('pairing sentences')
        english = descriptions(apt.lines('*_Translation-en*', 'English descriptions'), 'en')
        sources = source_packages(apt.lines('*_Packages*', 'list of packages'))
        text = []
        for language, lines in translated.items():
            token = f'<2{language}> ' if len(languages) > 1 else ''
            text += [(package, (token + source, target)) for package, (source, target) in
                     parallel_text(english, descriptions(lines, language), sources)]
        split = split_text(text)
    with atomic_folder(out, settings, force) as folder:
        for name in ('train', 'valid', 'test'):
            pairs = getattr(split, name)
            if not pairs:
                raise PreflightError(f'the package sources of this system have too little text for {name}; {HINT}.')
            for suffix, side in zip(('src', 'tgt'), zip(*pairs, strict=True), strict=True):
                text = ''.join(f'{line}\n' for line in side)
                (folder / f'{name}.{suffix}').write_text(text, encoding='utf-8', newline='\n')
        log('training subwords, one or two minutes')
        train_subwords([folder / 'train.src', folder / 'train.tgt'], folder / 'subwords.model', vocab_size)
    return split
