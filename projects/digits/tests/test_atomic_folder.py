import os
import signal

import pytest

from projects.digits.digits.atomic_folder import MARKER, FolderError, atomic_folder, is_complete
from tests.processes import FORKSERVER

SETTINGS = {'seed': 0, 'size': 3}


def make(folder, settings=SETTINGS, force=False, text='x'):
    with atomic_folder(folder, settings, force) as new:
        (new / 'deep').mkdir()
        (new / 'deep' / 'file').write_text(text)


def test_a_complete_folder_is_recognised(tmp_path):
    folder = tmp_path / 'a' / 'b'
    assert not is_complete(folder, SETTINGS)
    make(folder)
    assert is_complete(folder, SETTINGS)
    assert not is_complete(folder, SETTINGS, force=True)
    assert [path.name for path in folder.parent.iterdir()] == ['b']
    (tmp_path / 'empty').mkdir()
    make(tmp_path / 'empty')
    assert is_complete(tmp_path / 'empty', SETTINGS)


@pytest.mark.parametrize('force', [False, True])
@pytest.mark.parametrize('marker', [None, '{"settings": 1, "files": 1}'])
def test_strangers_folder_is_refused(tmp_path, force, marker):
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'photos' / 'dear.txt').write_text('dear')
    if marker is not None:
        (tmp_path / 'photos' / MARKER).write_text(marker)
    with pytest.raises(FolderError, match='photos holds files and was not made by this tool'):
        make(tmp_path / 'photos', force=force)
    assert (tmp_path / 'photos' / 'dear.txt').read_text() == 'dear'
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(FolderError, match='dear.txt is a file'):
        make(tmp_path / 'photos/dear.txt', force=True)


def test_other_settings_need_force(tmp_path):
    folder = tmp_path / 'made'
    make(folder)
    with pytest.raises(FolderError, match=r'\(size 3 instead of 4\)'):
        make(folder, {'seed': 0, 'size': 4}, text='y')
    assert (folder / 'deep/file').read_text() == 'x'
    make(folder, {'seed': 0, 'size': 4}, force=True, text='y')
    assert (folder / 'deep/file').read_text() == 'y'
    assert is_complete(folder, {'seed': 0, 'size': 4})
    assert [path.name for path in tmp_path.iterdir()] == ['made']


def test_lost_files_are_noticed(tmp_path):
    make(tmp_path / 'made')
    (tmp_path / 'made/deep/file').unlink()
    with pytest.raises(FolderError, match='lost files .0 of 1'):
        is_complete(tmp_path / 'made', SETTINGS)
    make(tmp_path / 'made', force=True)
    assert is_complete(tmp_path / 'made', SETTINGS)


def test_a_block_that_fails_changes_nothing(tmp_path):
    folder = tmp_path / 'made'
    make(folder)
    for path in (folder, tmp_path / 'other'):
        with pytest.raises(KeyboardInterrupt), atomic_folder(path, SETTINGS, force=True) as new:
            (new / 'file').write_text('y')
            raise KeyboardInterrupt
    assert is_complete(folder, SETTINGS) and (folder / 'deep/file').read_text() == 'x'
    assert [path.name for path in tmp_path.iterdir()] == ['made']


def test_failure_in_the_last_step_keeps_the_old(tmp_path, monkeypatch):
    folder = tmp_path / 'made'
    make(folder)
    rename = type(folder).rename

    def fail_for_new(path, target):
        if path.name == 'new':
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(type(folder), 'rename', fail_for_new)
    with pytest.raises(KeyboardInterrupt):
        make(folder, force=True, text='y')
    assert (folder / 'deep/file').read_text() == 'x'
    assert [path.name for path in tmp_path.iterdir()] == ['made']


def test_files_that_appear_meanwhile_are_kept(tmp_path):
    folder = tmp_path / 'made'
    with pytest.raises(FolderError, match='not made by this tool'), atomic_folder(folder, SETTINGS) as new:
        (new / 'file').write_text('x')
        folder.mkdir()
        (folder / 'dear.txt').write_text('dear')
    assert [path.name for path in folder.iterdir()] == ['dear.txt']
    assert [path.name for path in tmp_path.iterdir()] == ['made']


def test_link_stays_a_link(tmp_path):
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'data').symlink_to(tmp_path / 'disk' / 'digits')
    make(tmp_path / 'data')
    assert (tmp_path / 'data').is_symlink()
    assert is_complete(tmp_path / 'disk' / 'digits', SETTINGS)
    make(tmp_path / 'data', force=True)
    assert (tmp_path / 'data').is_symlink() and is_complete(tmp_path / 'data', SETTINGS)


def _hang(folder, connection):
    with atomic_folder(folder, SETTINGS) as new:
        (new / 'file').write_text('x')
        connection.send('there')
        connection.recv()


def test_leftover_of_a_killed_run_is_removed_but_not_that_of_a_live_one(tmp_path):
    folder = tmp_path / 'made'
    here, there = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=_hang, args=(folder, there), daemon=True)
    process.start()
    try:
        assert here.poll(60) and here.recv() == 'there'
        make(tmp_path / 'other')
        make(folder, text='mine')
        # The running one still has its temporary folder.
        assert len([path for path in tmp_path.iterdir() if path.name.startswith('.')]) == 1
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    make(folder, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {'made', 'other'}
