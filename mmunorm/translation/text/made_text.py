"""Makes a folder of parallel text from the translated package descriptions that apt fetches."""
from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...datasets.made_folder import is_made, making_folder
from ...utils import PreflightError, check_installed
from .debian import SplitText, descriptions, parallel_text, source_packages, split_text
from .subwords import train_subwords

LANGUAGES = ('it', 'da', 'fr')  # of those that Debian has, the ones that were tried
HELPER = '/usr/lib/apt/apt-helper'
OWN_TEXT = ("bring your own text instead, as train.src, train.tgt and the like: plain text, one sentence a line; "
            '`python tools/dataset/train_subwords.py` makes the subwords')
# Read after the system's own settings. apt writes nothing outside the folder.
CONFIG = """#clear Acquire::Languages;
Acquire::Languages {{ "en"; "{language}"; }};
Dir::State::lists "{folder}/lists";
Dir::Cache "{folder}/cache";
APT::Sandbox::User "";
"""


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
    with fetched_lists(language) as (packages, english, translated):
        say('pairing sentences')
        split = split_text(parallel_text(descriptions(english, 'en'), descriptions(translated, language),
                                         source_packages(packages)))
    with making_folder(out, settings, force) as folder:
        for name in ('train', 'valid', 'test'):
            pairs = getattr(split, name)
            if not pairs:
                raise PreflightError(f'the package sources of this system have too little text for {name}; {OWN_TEXT}.')
            for suffix, side in zip(('src', 'tgt'), zip(*pairs, strict=True), strict=True):
                text = ''.join(f'{line}\n' for line in side)
                (folder / f'{name}.{suffix}').write_text(text, encoding='utf-8', newline='\n')
        say('training subwords, one or two minutes')
        train_subwords([folder / 'train.src', folder / 'train.tgt'], folder / 'subwords.model', vocab_size)
    return split


@contextmanager
def fetched_lists(language: str) -> Iterator[list[Iterator[str]]]:
    """Fetches the lists of the system's own package sources into a temporary folder, as an ordinary user.

    Gives the lines of the lists of packages, of the English descriptions, and of those in `language`, such as 'it'. An
    empty line comes after each list.

    Raises:
        PreflightError: apt is missing or reaches no such lists.
    """
    if shutil.which('apt-get') is None or not Path(HELPER).exists():
        raise PreflightError(f'this system has no apt, which gets the text from Debian or Ubuntu; {OWN_TEXT}.')
    with tempfile.TemporaryDirectory(prefix='mmunorm-apt-') as folder:
        folder = Path(folder)
        for name in ('lists/partial', 'cache/archives/partial'):
            (folder / name).mkdir(parents=True)
        (folder / 'apt.conf').write_text(CONFIG.format(language=language, folder=folder))
        run = subprocess.run(['apt-get', '-c', folder / 'apt.conf', '-q', 'update'], cwd=folder, capture_output=True,
                             text=True)
        problems = (line for line in run.stderr.splitlines() if line.startswith(('E:', 'W:')))
        reason = next(problems, 'apt-get has said nothing')
        found = []
        for pattern, what in (('*_Packages*', 'list of packages'), ('*_Translation-en*', 'English descriptions'),
                              (f'*_Translation-{language}*', f'descriptions in the language {language!r}')):
            paths = sorted((folder / 'lists').glob(pattern))
            if not paths:
                raise PreflightError(f'apt has found no {what} ({reason}); {OWN_TEXT}.')
            found.append(_unpacked_lines(paths))
        yield found


def _unpacked_lines(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with subprocess.Popen([HELPER, 'cat-file', path], stdout=subprocess.PIPE, text=True, encoding='utf-8',
                              errors='replace') as process:
            yield from process.stdout
        yield ''
