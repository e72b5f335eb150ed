"""Folders that a tool creates atomically and recognizes later."""
import fcntl
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from mmunorm.utils import PreflightError

MARKER = '.made_by_mmunorm.json'


class FolderError(PreflightError):
    """A folder must not or cannot be written."""


def is_complete(folder, settings, force=False):
    """Whether a folder exists with these settings, a dict for JSON; else ``atomic_folder`` may write it.

    Raises:
        FolderError: if it is a file, or has files and was not created by ``atomic_folder``. Without ``force``, which
            overwrites one that was, also if it was created with other settings or files are missing.
    """
    folder = Path(folder)
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise FolderError(f'{folder} is a file: name a folder')
    marker = _read_marker(folder)
    if marker is None and any(folder.iterdir()):
        raise FolderError(f'{folder} holds files and was not made by this tool (no {MARKER} in it), so it is left '
                          'alone: name another folder')
    if marker is None or force:
        return False
    existing = marker['settings']
    differences = [f'{key} {existing.get(key)} instead of {settings.get(key)}' for key in {**settings, **existing}
                   if existing.get(key) != settings.get(key)]
    if differences:
        raise FolderError(f'{folder} was made with other settings ({", ".join(differences)}): name another folder, or '
                          'overwrite it with --force')
    count = _count_files(folder)
    if count < marker['files']:
        raise FolderError(f'{folder} has lost files ({count} of {marker["files"]} are there): make it anew with '
                          '--force')
    return True


@contextmanager
def atomic_folder(folder, settings, force=False):
    """A context with a temporary folder, which is moved to its place at the end of the ``with`` block.

    The temporary folder is next to the real one. If the block fails or is interrupted, it is removed and nothing else
    changes. The next run removes temporary folders of killed runs. Arguments and errors are those of ``is_complete``.
    """
    # Keeps a symbolic link to another disk.
    folder = Path(os.path.realpath(folder))
    is_complete(folder, settings, force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f'.{folder.name}.making-'
    for sibling in folder.parent.iterdir():
        if sibling.name.startswith(prefix):
            _remove_if_abandoned(sibling)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        with open(temporary / 'lock', 'w') as lock:
            # Held during the lifetime of this process, to mark the folder as in use.
            fcntl.flock(lock, fcntl.LOCK_EX)
            new = temporary / 'new'
            new.mkdir()
            yield new
            marker = {'settings': settings, 'files': _count_files(new)}
            (new / MARKER).write_text(json.dumps(marker, indent=1) + '\n', encoding='utf-8')
            # Another process may have written to it in the meantime.
            if not is_complete(folder, settings, force):
                _replace(folder, new, temporary / 'old')
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(folder, new, old):
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise


def _read_marker(folder):
    with suppress(OSError, ValueError, KeyError, TypeError):
        marker = json.loads((folder / MARKER).read_text(encoding='utf-8'))
        if isinstance(marker['settings'], dict) and isinstance(marker['files'], int):
            return marker
    return None


def _count_files(folder):
    return sum(len(set(files) - {MARKER}) for _, _, files in os.walk(folder))


def _remove_if_abandoned(temporary):
    with suppress(OSError), open(temporary / 'lock', 'r+') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(temporary, ignore_errors=True)
