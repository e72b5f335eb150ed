"""Tiny photographs, and their data sets."""
import numpy as np
from PIL import Image, ImageDraw

from projects.photographs.photographs.photographs import make_photographs
from projects.photographs.photographs.stamps import BACKGROUNDS, STAMPS
from tests import tiny_runs


def make_stamps(root, count=4, backgrounds=5):
    """Stands in for Debian's images: coloured ellipses with an empty margin in `root/stamps`, `count` of a kind, and
    noise in `root/wallpapers`, under the names of the true ones. Returns both folders."""
    rng = np.random.default_rng(0)
    for folders in STAMPS.values():
        names = [f'{folder}/{name}' for folder, listed in folders.items() for name in listed.split()]
        for name in names[:count]:
            path = root / 'stamps' / f'{name}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.new('RGBA', (60, 50))
            colour = tuple(int(value) for value in rng.integers(256, size=3))
            ImageDraw.Draw(image).ellipse((10, 10, 49, 34), fill=(*colour, 255))
            image.save(path)
    (root / 'wallpapers').mkdir()
    for name in BACKGROUNDS[-backgrounds:]:
        pixels = rng.integers(256, size=(150, 200, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / 'wallpapers' / f'{name}.jpg')
    return root / 'stamps', root / 'wallpapers'


def make_tiny(root, sources, **settings):
    """The sets of `make_photographs.py` in `root`, a few small images of :func:`make_stamps`."""
    stamps, wallpapers = make_stamps(sources)
    sizes = dict(train_scenes=2, val_scenes=2, scene_size=64, train_images=10, val_images=10)
    return make_photographs(root, stamps, [wallpapers], **{**sizes, **settings})


def tiny_photographs(cfg, root):
    """Writes the data of a config; returns the `--cfg-options` for one step on it.

    Tests on val, so that a test finds the scores of its validation.
    """
    make_tiny(root, root.with_name('sources'))
    if cfg.train_dataloader.dataset.type == 'CocoDataset':
        root = root / 'coco'
        return [*tiny_runs.run_options(cfg, root), *tiny_runs.coco_options(cfg, root, 'instances_val.json'),
                'test_dataloader.dataset.ann_file=annotations/instances_val.json',
                'test_dataloader.dataset.data_prefix.img=val/']
    return [*tiny_runs.run_options(cfg, root / 'imagenet', batch_size=10), 'test_dataloader.dataset.data_prefix=val']
