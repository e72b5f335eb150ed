"""Makes dark versions of the digit scenes of `tools/dataset/make_digits.py`, with the same annotations."""
import argparse

from mmunorm.cli.arguments import command
from projects.low_light.low_light.darkness import make_dark


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--source', default='data/digits/coco', help='folder of scenes in the COCO format')
    parser.add_argument('--out', default='data/digits_dark', help='output folder')
    parser.add_argument('--seed', type=int, default=0, help='seed of all random choices')
    parser.add_argument('--force', action='store_true',
                        help='overwrite the whole folder OUT if this tool created it')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    count = make_dark(**vars(args))
    print(f'{args.out} already exists with these settings.' if count is None else
          f'{args.out} has the {count} images of {args.source} in the dark; preview.png shows some.')


if __name__ == '__main__':
    main()
