"""Package descriptions and their translations, fetched by apt."""
from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import PreflightError

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
def fetched_lists(language: str) -> Iterator[AptLists]:
    """Fetches the lists of the system's own package sources into a temporary folder, as an ordinary user.

    Args:
        language: code of the translations, beside English, such as 'it'.

    Raises:
        PreflightError: apt is missing or reaches no such lists.
    """
    if shutil.which('apt-get') is None or not Path(HELPER).exists():
        raise PreflightError(f'this system has no apt, which gets the text from Debian or Ubuntu; {OWN_TEXT}.')
    with tempfile.TemporaryDirectory(prefix='mmunorm-apt-') as folder:
        for name in ('lists/partial', 'cache/archives/partial'):
            Path(folder, name).mkdir(parents=True)
        config = Path(folder, 'apt.conf')
        config.write_text(CONFIG.format(language=language, folder=folder))
        run = subprocess.run(['apt-get', '-c', config, '-q', 'update'], capture_output=True, text=True)
        lists = AptLists(Path(folder, 'lists'))
        for pattern, what in (('*_Packages*', 'list of packages'), ('*_Translation-en*', 'English descriptions'),
                              (f'*_Translation-{language}*', f'descriptions in the language {language!r}')):
            if not lists.files(pattern):
                reason = next((line for line in run.stderr.splitlines() if line.startswith(('E:', 'W:'))),
                              'the package sources of this system have none')
                raise PreflightError(f'apt has found no {what} ({reason}); {OWN_TEXT}.')
        yield lists


class AptLists:
    """The folder of lists that apt has fetched."""

    def __init__(self, folder: Path):
        self.folder = folder

    def files(self, pattern: str) -> list[Path]:
        return sorted(path for path in self.folder.glob(pattern) if path.is_file())

    def lines(self, pattern: str) -> Iterator[str]:
        """The lines of all lists whose names fit, unpacked. An empty line comes after each list."""
        for path in self.files(pattern):
            with subprocess.Popen([HELPER, 'cat-file', path], stdout=subprocess.PIPE, text=True, encoding='utf-8',
                                  errors='replace') as process:
                yield from process.stdout
            yield ''
