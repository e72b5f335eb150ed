"""Converts ExDark's annotations to COCO format, for projects/low_light/configs/exdark."""
import argparse

from mmunorm.cli.arguments import command
from projects.low_light.low_light.exdark import convert_exdark


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='ROOT holds imageclasslist.txt, the images ExDark/CLASS/NAME and the boxes '
        'ExDark_Annno/CLASS/NAME.txt. ROOT/annotations gets train.json, val.json and test.json.')
    parser.add_argument('root', metavar='ROOT', help='folder of ExDark, such as data/exdark')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    for split, (images, boxes) in convert_exdark(args.root).items():
        print(f'{args.root}/annotations/{split}.json: {images} images with {boxes} boxes')


if __name__ == '__main__':
    main()
