"""The lists of packages and translated descriptions that apt fetches."""
from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...utils import PreflightError

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


@contextmanager
def fetched_lists(language: str) -> Iterator[Apt]:
    """Fetches the lists of the system's own package sources into a temporary folder, as an ordinary user.

    Args:
        language: code of the translations, beside English, such as 'it'.

    Raises:
        PreflightError: apt is missing or reaches no such lists.
    """
    if shutil.which('apt-get') is None or not Path(HELPER).exists():
        raise PreflightError(f'this system has no apt, which gets the text from Debian or Ubuntu; {OWN_TEXT}.')
    with tempfile.TemporaryDirectory(prefix='mmunorm-apt-') as folder:
        apt = Apt(Path(folder), language)
        reason = apt.get('update')
        for pattern, what in (('*_Packages*', 'list of packages'), ('*_Translation-en*', 'English descriptions'),
                              (f'*_Translation-{language}*', f'descriptions in the language {language!r}')):
            if not apt.lists(pattern):
                raise PreflightError(f'apt has found no {what} ({reason}); {OWN_TEXT}.')
        yield apt


class Apt:
    """apt, with a folder for all that it fetches."""

    def __init__(self, folder: Path, language: str):
        self.folder = folder
        for name in ('lists/partial', 'cache/archives/partial'):
            (folder / name).mkdir(parents=True)
        (folder / 'apt.conf').write_text(CONFIG.format(language=language, folder=folder))

    def get(self, *arguments: str) -> str:
        """Runs `apt-get` in the folder. What it has said first of errors and warnings."""
        run = subprocess.run(['apt-get', '-c', self.folder / 'apt.conf', '-q', *arguments], cwd=self.folder,
                             capture_output=True, text=True)
        problems = (line for line in run.stderr.splitlines() if line.startswith(('E:', 'W:')))
        return next(problems, 'apt-get has said nothing')

    def lists(self, pattern: str) -> list[Path]:
        """The lists whose names fit."""
        return sorted((self.folder / 'lists').glob(pattern))

    def lines(self, pattern: str) -> Iterator[str]:
        """The lines of all lists whose names fit, unpacked. An empty line comes after each list."""
        for path in self.lists(pattern):
            with subprocess.Popen([HELPER, 'cat-file', path], stdout=subprocess.PIPE, text=True, encoding='utf-8',
                                  errors='replace') as process:
                yield from process.stdout
            yield ''
