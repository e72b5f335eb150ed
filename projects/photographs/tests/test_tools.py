from pathlib import Path

import pytest

from projects.photographs.photographs import apt
from projects.photographs.photographs.photographs import LICENCES, STAMP_PACKAGE

from .makers import make_stamps

TOOL = 'photographs:make_photographs'
TINY = (TOOL, '--train-scenes', 1, '--val-scenes', 1, '--scene-size', 64, '--train-images', 10, '--val-images', 10)

# Fakes of apt-get, which writes lists and packages into its folder, and of dpkg-deb. A package links to a folder.
APT_GET = """#!/bin/sh
case "$4" in
update) touch lists/x_Packages;;
download) test -d FOLDER/$5 && ln -s FOLDER/$5 $5_1.0_all.deb || echo "E: Unable to locate package $5" >&2;;
esac
"""
DPKG_DEB = """#!/bin/sh
test "$1" = -x && cp -r "$2"/. "$3"
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A system whose apt has the packages."""
    folder = tmp_path / 'packages'
    stamps, wallpapers = make_stamps(tmp_path)
    for package in LICENCES:
        (folder / package / 'usr/share').mkdir(parents=True)
    (folder / STAMP_PACKAGE / 'usr/share/tuxpaint').mkdir()
    stamps.rename(folder / STAMP_PACKAGE / 'usr/share/tuxpaint/stamps')
    wallpapers.rename(folder / 'mate-backgrounds/usr/share/backgrounds')
    (tmp_path / 'bin').mkdir()
    for name, script in {'apt-get': APT_GET.replace('FOLDER', str(folder)), 'dpkg-deb': DPKG_DEB}.items():
        (tmp_path / 'bin' / name).write_text(script)
        (tmp_path / 'bin' / name).chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'), prepend=':')
    monkeypatch.setattr(apt, 'HELPER', str(tmp_path / 'bin/apt-get'))
    return folder


def test_from_packages_and_only_once(call, packages):
    printed = call(*TINY)
    assert 'train 1 scenes of 64x64' in printed and '10 images of 32x32, from 14 stamps and 3 backgrounds' in printed
    assert 'data/photographs has 7 kinds: animal,' in printed
    assert Path('data/photographs/preview.png').is_file()
    assert {path.name for path in Path('data').iterdir()} == {'photographs', 'debian_images'}
    assert 'already exists' in call(*TINY)
    assert 'seed 0 instead of 1' in call(*TINY, '--seed', 1)
    # What was fetched is used again.
    (packages / 'mate-backgrounds').rename(packages / 'gone')
    assert '7 kinds' in call(*TINY, '--seed', 1, '--force')


def test_errors_write_nothing(call, packages, monkeypatch):
    (packages / 'mate-backgrounds').rename(packages / 'gone')
    error = call(*TINY)
    assert 'cannot download the package mate-backgrounds (E: Unable to locate package mate-backgrounds)' in error
    assert '--stamps and --backgrounds' in error
    monkeypatch.setattr(apt, 'HELPER', 'nowhere')
    error = call(*TINY)
    assert 'this system has no apt' in error and '--stamps and --backgrounds' in error
    assert [path.name for path in Path('data').iterdir()] == ['debian_images']
    kept = {path.name for path in Path('data/debian_images').iterdir()}  # those already downloaded
    assert kept == set(list(LICENCES)[:list(LICENCES).index('mate-backgrounds')])


def test_other_packages_are_kept(call, packages):
    (packages / 'other').mkdir()
    apt.fetch_packages(Path('data/debian_images'), ['other', STAMP_PACKAGE], 'the images', '')
    assert '7 kinds' in call(*TINY)
    assert {path.name for path in Path('data/debian_images').iterdir()} == {'other', *LICENCES}


def test_from_folders(call, tmp_path):
    stamps, wallpapers = make_stamps(tmp_path)
    assert '7 kinds' in call(*TINY, '--stamps', stamps, '--backgrounds', wallpapers)
    assert {path.name for path in Path('data').iterdir()} == {'photographs'}
    assert 'must be given together' in call(*TINY, '--stamps', stamps)
    error = call(TOOL, '--out', 'b', '--stamps', '.', '--backgrounds', wallpapers)
    assert '0 of the 97 stamps of the kind animal' in error
    assert '--train-images must be a whole number' in call(TOOL, '--out', 'b', '--train-images', 0)
