"""A few small digits, and the options with which the configs run one step on them."""
from projects.digits.digits import maker
from tests import tiny_runs


def make_digits(root, images=10):
    """What `projects/digits/tools/make_digits.py` makes in `root`: a few small scenes and images."""
    maker.make_digits(root, train_scenes=2, val_scenes=2, scene_size=64, train_images=images, val_images=images)


def tiny_digits(cfg, root):
    """Makes the digits of a config under `root`; returns the `--cfg-options` for one step on all of them."""
    dataset = cfg.train_dataloader.dataset
    if dataset.type == 'HandwrittenDigits':
        return tiny_runs.step_options(cfg) + [f'{split}_dataloader.{setting}' for split in ('train', 'val', 'test')
                                              for setting in ('dataset.indices=10', 'batch_size=10')]
    make_digits(root)
    if dataset.type == 'CocoDataset':
        root = root / 'coco'
        return [*tiny_runs.run_options(cfg, root), *tiny_runs.coco_options(cfg, root, 'instances_val.json')]
    return tiny_runs.run_options(cfg, root / 'imagenet', batch_size=10)
