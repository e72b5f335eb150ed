"""Cuts unlabelled crops from photographs and other images, to calibrate and adapt a converted model."""
import argparse

from mmunorm.cli.arguments import command, not_negative, positive
from mmunorm.datasets.crops import SPLITS, make_crops


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Without --images, apt downloads Debian packages (1.2 GB) from this system's sources, without root and "
        'without installing them, and unpacks them in debian_images next to OUT.')
    parser.add_argument('--out', default='data/crops', help='output folder, with train and test')
    parser.add_argument('--images', metavar='DIR', nargs='+', default=[], help='folders of images to use instead')
    parser.add_argument('--size', type=positive, default=256, help='side of a crop in pixels')
    parser.add_argument('--seed', type=not_negative, default=0, help='seed of all random choices')
    parser.add_argument('--force', action='store_true',
                        help='overwrite the whole folder OUT if this tool created it')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    counts = make_crops(**vars(args))
    if counts is None:
        print(f'{args.out} already exists with these settings.')
        return
    for split in SPLITS:
        print(f'{args.out}/{split:5} {counts["crops"][split]} crops of {counts["images"][split]} images')
    print(f'{args.out}/README.md lists the images and their checksums.')


if __name__ == '__main__':
    main()
