"""Makes the handwritten-digit data sets of configs/digits: COCO scenes and ImageNet folders."""
import argparse

from mmunorm.cli.arguments import command
from mmunorm.datasets import make_digits
from mmunorm.utils import PreflightError


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description='Writes scenes of handwritten digits in COCO format (OUT/coco) and single '
        'digits in ImageNet folders (OUT/imagenet), from the data bundled with scikit-learn.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--out', default='data/digits', help='output folder')
    parser.add_argument('--seed', type=int, default=0, help='seed of all random choices')
    parser.add_argument('--train-scenes', type=int, default=1500, help='COCO train images')
    parser.add_argument('--val-scenes', type=int, default=200, help='COCO val images')
    parser.add_argument('--scene-size', type=int, default=128, help='side of a scene in pixels')
    parser.add_argument('--train-images', type=int, default=6000, help='classification images')
    parser.add_argument('--val-images', type=int, default=1000, help='classification images')
    parser.add_argument('--image-size', type=int, default=32, help='side of a classification image in pixels')
    parser.add_argument('--force', action='store_true',
                        help='overwrite the whole folder OUT if this tool created it')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    out, size, side = args.out, args.scene_size, args.image_size
    try:
        counts = make_digits(**vars(args))
    except ValueError as error:  # begins with the name of a setting
        raise PreflightError(f'--{error}.'.replace('_', '-')) from error
    if counts is None:
        print(f'{out} already exists with these settings.')
        return
    print(f'{out}/coco      {args.train_scenes} train scenes with {counts["train"]} digits, '
          f'{args.val_scenes} val scenes with {counts["val"]}, {size}x{size} pixels')
    print(f'{out}/imagenet  {args.train_images} train and {args.val_images} val images, {side}x{side} pixels')
    print(f'{out}/preview.png shows val scenes with their boxes and masks.')


if __name__ == '__main__':
    main()
