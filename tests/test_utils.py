"""Files that are written: as a whole, or not at all."""
import errno
import os

import pytest

from mmunorm.utils import PreflightError, whole_file, write_text


def test_an_incomplete_write_keeps_the_older_file(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('old')
    with pytest.raises(OSError, match='No space left on device'), whole_file(path) as part:
        part.write_text('ne')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['a.txt']

    (tmp_path / 'link.txt').symlink_to(path)
    write_text(tmp_path / 'link.txt', 'new')
    assert path.read_text() == 'new' and (tmp_path / 'link.txt').is_symlink()
    with whole_file(path):
        pass
    assert path.read_text() == 'new'


@pytest.mark.parametrize('make, kind', [
    (lambda path: path.mkdir(), 'folder'), (lambda path: path.symlink_to('/dev/null'), 'device or a pipe'),
    (lambda path: path.symlink_to(path), 'circular link')])
def test_special_files_are_not_replaced(make, kind, tmp_path):
    make(tmp_path / 'a')
    before = os.lstat(tmp_path / 'a')
    with pytest.raises(PreflightError, match=f'a: must be a regular file, and is a {kind}'):
        write_text(tmp_path / 'a', 'new')
    assert os.lstat(tmp_path / 'a')[:8] == before[:8] and os.listdir(tmp_path) == ['a']
