"""Downloads package lists and packages with apt from the package sources of this system, without root."""
from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from mmunorm.utils import PreflightError
from projects.digits.digits.atomic_folder import atomic_folder, is_complete

HELPER = '/usr/lib/apt/apt-helper'
# Read after the system's settings. apt writes nothing outside the folder.
CONFIG = """#clear Acquire::Languages;
Acquire::Languages {{ {languages} }};
Dir::State::lists "{folder}/lists";
Dir::Cache "{folder}/cache";
APT::Sandbox::User "";
"""


@contextmanager
def fetched_lists(languages: Sequence[str], what: str, hint: str) -> Iterator[Apt]:
    """Downloads the lists of the system's package sources into a temporary folder.

    Args:
        languages: language codes of the descriptions, such as 'en'; 'none' for none.
        what: description of the download, for error messages.
        hint: an alternative without apt, for error messages.

    Raises:
        PreflightError: apt is missing or cannot download a list of packages.
    """
    if shutil.which('apt-get') is None or not Path(HELPER).exists():
        raise PreflightError(f'this system has no apt, which gets {what} from Debian or Ubuntu; {hint}.')
    with tempfile.TemporaryDirectory(prefix='mmunorm-apt-') as folder:
        apt = Apt(Path(folder), languages, hint)
        apt.reason = apt.get('update')
        apt.lines('*_Packages*', 'list of packages')  # raises an error without sources
        yield apt


def fetch_packages(folder: Path, packages: Iterable[str], what: str, hint: str) -> None:
    """Downloads and unpacks packages, each atomically into a folder of its name, unless that exists.

    Args:
        folder: the folder of these folders, created if missing.
        packages: names of the packages.
        what, hint: see :func:`fetched_lists`.

    Raises:
        PreflightError: apt is missing, or cannot download a package.
        FolderError: the folder must not be overwritten.
    """
    missing = [package for package in packages if not is_complete(folder / package, dict(package=package))]
    if not missing:
        return
    with fetched_lists(('none', ), what, hint) as apt:
        for package in tqdm(missing, 'packages', disable=None):
            with atomic_folder(folder / package, dict(package=package)) as new:
                apt.unpack(package, new)


class Apt:
    """apt with a folder for its downloads."""

    def __init__(self, folder: Path, languages: Sequence[str], hint: str):
        self.folder, self.hint = folder, hint
        self.reason = ''
        for name in ('lists/partial', 'cache/archives/partial'):
            (folder / name).mkdir(parents=True)
        quoted = ' '.join(f'"{language}";' for language in languages)
        (folder / 'apt.conf').write_text(CONFIG.format(languages=quoted, folder=folder))

    def get(self, *arguments: str) -> str:
        """Runs `apt-get` in the folder. Returns its first error or warning."""
        run = subprocess.run(['apt-get', '-c', self.folder / 'apt.conf', '-q', *arguments], cwd=self.folder,
                             capture_output=True, text=True)
        problems = (line for line in run.stderr.splitlines() if line.startswith(('E:', 'W:')))
        return next(problems, 'apt-get printed no error')

    def lines(self, pattern: str, what: str) -> Iterator[str]:
        """The lines of all lists whose names match, decompressed, with an empty line after each list.

        Raises:
            PreflightError: there is no such list; the message has `what`.
        """
        paths = sorted((self.folder / 'lists').glob(pattern))
        if not paths:
            raise PreflightError(f'apt has found no {what} ({self.reason}); {self.hint}.')
        return _unpacked_lines(paths)

    def unpack(self, package: str, folder: Path) -> None:
        """Downloads a package and unpacks its files into a folder, without installing it.

        Raises:
            PreflightError: apt cannot download the package, or it cannot be unpacked.
        """
        reason = self.get('download', package)
        archives = list(self.folder.glob(f'{package}_*.deb'))
        if not archives:
            raise PreflightError(f'apt cannot download the package {package} ({reason}); {self.hint}.')
        run = subprocess.run(['dpkg-deb', '-x', archives[0], folder], capture_output=True, text=True)
        archives[0].unlink()
        if run.returncode:
            raise PreflightError(f'the package {package} cannot be unpacked ({run.stderr.strip()}); {self.hint}.')


def _unpacked_lines(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with subprocess.Popen([HELPER, 'cat-file', path], stdout=subprocess.PIPE, text=True, encoding='utf-8',
                              errors='replace') as process:
            yield from process.stdout
        yield ''
