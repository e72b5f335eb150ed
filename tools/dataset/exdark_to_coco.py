"""Writes ExDark's annotations in the COCO format, for configs/exdark."""
import argparse
import sys

from mmunorm.datasets.exdark import ExDarkError, convert_exdark


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='ROOT holds imageclasslist.txt, the pictures ExDark/CLASS/NAME and the boxes '
        'ExDark_Annno/CLASS/NAME.txt. ROOT/annotations gets train.json, val.json and test.json.')
    parser.add_argument('root', metavar='ROOT', help='folder of ExDark, such as data/exdark')
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    try:
        counts = convert_exdark(args.root)
    except ExDarkError as error:
        sys.exit(f'exdark_to_coco: {error}.')
    except OSError as error:
        sys.exit(f'exdark_to_coco: {error.filename}: {error.strerror}')
    for split, (pictures, boxes) in counts.items():
        print(f'{args.root}/annotations/{split}.json: {pictures} pictures with {boxes} boxes')


if __name__ == '__main__':
    main()
