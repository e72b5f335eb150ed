"""Full disks, damaged images, odd images: success or a one-line error, and old files stay."""
import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.fileio.backends import LocalBackend

from mmunorm.backbones import UNT2TViT
from mmunorm.cli.resume import find_resumable, is_whole
from mmunorm.config.models import build_model
from mmunorm.utils import PreflightError, whole_file, write_text

from . import tiny_runs

DIGITS = tiny_runs.ROOT / 'configs/digits'

pytestmark = pytest.mark.usefixtures('in_a_folder')


run = tiny_runs.call


def error_of(capsys, status, name, *arguments):
    return tiny_runs.error_of(capsys, name, *arguments, status=status)


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 MB."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    if shutil.which('mount') is None:
        pytest.skip('there is no `mount`')
    done = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'no file system can be mounted here: {done.stderr.strip()}')
    yield folder
    subprocess.run(['umount', '-l', folder], check=True)


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(self, content, path):
    """`LocalBackend.put` on a disk that is too small."""
    Path(path).write_bytes(bytes(content)[:len(content) // 2])
    full()


@pytest.fixture
def scenes(tmp_path):
    """`(config, options, weights, folder)` of the digits detector, and its data of two small scenes."""
    cfg = Config.fromfile(DIGITS / 'swin_un_maskrcnn.py')
    cfg.model.backbone.init_cfg = None
    options = tiny_runs.tiny_data(cfg, tmp_path / 'digits')
    weights = tiny_runs.save_weights(cfg, tmp_path / 'a.pth', cfg.metainfo['classes'])
    return DIGITS / 'swin_un_maskrcnn.py', ['--cfg-options', *options], weights, tmp_path / 'digits/coco'


@pytest.fixture
def images(classifier, tmp_path):
    """`(config, options, weights, folder)` of the classifier, with a copy of its data to be damaged."""
    config, weights, data = classifier
    shutil.copytree(data, tmp_path / 'data')
    options = [f'{split}_dataloader.dataset.data_root={tmp_path / "data"}' for split in ('train', 'val', 'test')]
    return config, ['--cfg-options', *options], weights, tmp_path / 'data'


# Full disks


def test_an_incomplete_write_keeps_the_older_file(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('old')
    with pytest.raises(OSError, match='No space left on device') as caught, whole_file(path) as part:
        part.write_text('ne')
        full()
    assert caught.value.filename == str(path)
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['a.txt']

    (tmp_path / 'link.txt').symlink_to(path)
    write_text(tmp_path / 'link.txt', 'new')
    assert path.read_text() == 'new' and (tmp_path / 'link.txt').is_symlink()
    with whole_file(path):
        pass
    assert path.read_text() == 'new'


@pytest.mark.parametrize('make, kind', [
    (lambda path: path.mkdir(), 'folder'), (os.mkfifo, 'device or a pipe'),
    (lambda path: path.symlink_to('/dev/null'), 'device or a pipe'),
    (lambda path: path.symlink_to(path), 'circular link')])
def test_special_files_are_not_replaced(make, kind, tmp_path):
    make(tmp_path / 'a')
    before = os.lstat(tmp_path / 'a')
    with pytest.raises(PreflightError, match=f'a: must be a regular file, and is a {kind}'):
        write_text(tmp_path / 'a', 'new')
    assert os.lstat(tmp_path / 'a')[:8] == before[:8] and os.listdir(tmp_path) == ['a']


@pytest.mark.slow
def test_results_on_a_full_disk(disk, images, tmp_path, capsys):
    config, options, weights, _ = images
    out = disk / 'out'
    commands = (
        ('test', config, weights, '--work-dir', 'tested', '--fuse', '--save', out / 'folded.pth', *options),
        ('test', config, weights, '--work-dir', 'tested', '--out', out / 'a.pkl', *options),
        ('infer', config, weights, 'data/dark', '--out-dir', out, '--device', 'cpu'))
    for command in commands:
        run(*command)
    before = {path.name: path.read_bytes() for path in out.rglob('*.*')}
    assert set(before) == {'folded.pth', 'a.pkl', '0.png', '1.png', '0.json', '1.json'}
    size = sum(map(len, before.values())) + 40960
    subprocess.run(['mount', '-o', f'remount,size={size}', disk], check=True)
    with pytest.raises(OSError), (disk / 'rest').open('ab') as rest:
        rest.write(b'0' * 10**6)
    for command in commands:
        message = error_of(capsys, 3, *command)
        assert message.startswith(f'error: {out}/') and message.endswith(': No space left on device')
    assert {path.name: path.read_bytes() for path in out.rglob('*.*')} == before


@pytest.mark.slow
def test_a_checkpoint_that_the_disk_is_too_small_for(images, tmp_path, monkeypatch, capsys):
    config, options, *_ = images
    train = ('train', config, '--work-dir', 'w', '--resume', *options)
    run(*train)
    before = Path('w/epoch_1.pth').read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, 'put', half_written)
        message = error_of(capsys, 3, *train, 'train_cfg.max_epochs=3')
    assert message == (f'error: the run in {tmp_path}/w stopped after step 4: No space left on device. Once that is '
                       'fixed, --resume goes on from the last whole checkpoint.')
    assert not is_whole('w/epoch_2.pth') and Path('w/epoch_1.pth').read_bytes() == before
    assert Path('w/last_checkpoint').read_text().endswith('epoch_1.pth')
    assert find_resumable('w') == ('w/epoch_1.pth', ['w/epoch_2.pth'])

    run(*train, 'train_cfg.max_epochs=3')
    assert 'epoch_2.pth was not written to its end: resuming from w/epoch_1.pth' in capsys.readouterr().err
    assert torch.load('w/epoch_3.pth', weights_only=False)['meta']['iter'] == 6 and is_whole('w/epoch_2.pth')


# Images that cannot be read


def cut(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b'')


def dangling_link(path):
    path.unlink()
    path.symlink_to('nowhere')


def test_a_damaged_image_is_named_also_by_a_worker(images, capsys):
    config, options, weights, data = images
    empty(data / 'dark/1.png')
    for command in (('train', config), ('test', config, weights)):
        message = error_of(capsys, 3, *command, '--work-dir', 'w', *options, 'test_dataloader.num_workers=1')
        assert message == f'error: cannot use the image {data}/dark/1.png: it is empty, truncated, or not an image.'


@pytest.mark.slow
def test_a_folder_with_damaged_images_is_drawn_without_them(images, capsys):
    config, _, weights, data = images
    for name, damage in (('cut.png', cut), ('empty.png', empty), ('nowhere.png', dangling_link)):
        shutil.copyfile(data / 'dark/0.png', data / 'dark' / name)
        damage(data / 'dark' / name)
    (data / 'dark/loop.png').symlink_to('loop.png')
    (data / 'dark/folder.png').mkdir()
    run('infer', config, weights, data / 'dark', '--out-dir', 'out', '--device', 'cpu')
    *_, skipped, count = capsys.readouterr().out.splitlines()
    assert sorted(skipped.removeprefix('skipped: ').split('; ')) == [
        f'{data}/dark/{name}.png: not readable as an image' for name in ('cut', 'empty', 'folder', 'loop', 'nowhere')]
    assert count == 'out has 2 images' and sorted(os.listdir('out')) == ['0.png', '1.png', 'preds']


# Odd images


def draw(path, height, width):
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def make_odd(folder, split, height, width):
    """Replaces the first scene by one of another size, with a digit that fills it."""
    path = folder / f'annotations/instances_{split}.json'
    content = json.loads(path.read_text())
    scene = content['images'][0]
    scene.update(height=height, width=width)
    for annotation in content['annotations']:
        if annotation['image_id'] == scene['id']:
            annotation.update(bbox=[0, 0, width, height], area=width * height,
                              segmentation=[[0, 0, width, 0, width, height, 0, height]])
    path.write_text(json.dumps(content))
    draw(folder / split / scene['file_name'], height, width)
    return folder / split / scene['file_name']


@pytest.mark.slow
def test_odd_scenes(scenes, capsys):
    """An image of 1 x 1 works. At the size of the small config, one of 20000 x 20 is less than a pixel high."""
    config, options, weights, folder = scenes
    image = make_odd(folder, 'train', 20, 20000)
    message = error_of(capsys, 3, 'train', config, '--work-dir', 'w', *options)
    assert message.startswith(f'error: cannot use the image {image} of 20000 x 20 pixels: OpenCV refuses it (')
    assert message.endswith(' in resize).')
    draw(Path('in/small.png'), 1, 1)
    draw(Path('in/wide.png'), 20, 20000)
    run('infer', config, weights, 'in', '--out-dir', 'out', '--no-save-pred', '--device', 'cpu', '--score-thr', '0',
        *options)
    *_, left_out, count = capsys.readouterr().out.splitlines()
    assert left_out.startswith('skipped: in/wide.png (20000 x 20 pixels): OpenCV')
    assert count == 'out has 1 image' and os.listdir('out') == ['small.png']


@pytest.mark.slow
@pytest.mark.parametrize('name', ['swin_un_classifier', 't2t_un_classifier'])
def test_backbones_take_odd_sizes(name):
    cfg = Config.fromfile(DIGITS / f'{name}.py')
    cfg.model.backbone.init_cfg = None
    backbone = build_model(cfg).backbone.eval()
    smallest = 1
    with torch.no_grad():
        if isinstance(backbone, UNT2TViT):
            with pytest.raises(RuntimeError, match='spatial size'):  # its first window takes 3 pixels at least
                backbone(torch.randn(1, 3, 1, 1))
            smallest = 3
        for size in ((smallest, smallest), (20, 20000)):
            outputs = backbone(torch.randn(1, 3, *size))
            assert all(output.numel() and output.isfinite().all() for output in outputs)
