"""Shared by the tools that create data sets."""
import argparse
from collections.abc import Callable

from mmunorm.cli.arguments import non_negative
from mmunorm.utils import PreflightError


def data_parser(description: str, out: str | None, epilog: str | None = None,
                 seed: bool = True) -> argparse.ArgumentParser:
    """A parser with `--out`, `--seed` and `--force`."""
    parser = argparse.ArgumentParser(description=description, epilog=epilog,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--out', default=out, help='folder to write')
    if seed:
        parser.add_argument('--seed', type=non_negative, default=0, help='seed of all random choices')
    parser.add_argument('--force', action='store_true',
                        help='overwrite OUT, with everything in it, if this tool made it')
    return parser


def add_size_arguments(parser: argparse.ArgumentParser, train_images: int, more: str = '') -> None:
    """Adds the sizes of a set of scenes and one of images; `more` names other splits of the size of val."""
    parser.add_argument('--train-scenes', type=int, default=1500, help='COCO train images')
    parser.add_argument('--val-scenes', type=int, default=200, help=f'COCO val images{more}')
    parser.add_argument('--scene-size', type=int, default=128, help='side of a scene in pixels')
    parser.add_argument('--train-images', type=int, default=train_images, help='classification images')
    parser.add_argument('--val-images', type=int, default=1000, help=f'classification images{more}')
    parser.add_argument('--image-size', type=int, default=32, help='side of a classification image in pixels')


def run_maker(maker: Callable, out: str, **settings):
    """Calls a maker of a data set and returns its counts; prints that the folder exists if it returns None."""
    try:
        counts = maker(out=out, **settings)
    except ValueError as error:
        if str(error).partition(' ')[0] not in settings:
            raise
        raise PreflightError(f'--{error}.'.replace('_', '-')) from error
    if counts is None:
        print(f'{out} already exists with these settings.')
    return counts
