"""Makes dark versions of the scenes of `projects/digits/tools/make_digits.py`, with the same annotations."""
from mmunorm.cli.arguments import command
from projects.digits.digits.data_tools import data_parser, run_maker
from projects.low_light.low_light.darkness import make_dark


def parse_args(argv=None):
    parser = data_parser(__doc__, 'data/digits_dark')
    parser.add_argument('--source', default='data/digits/coco', help='folder of scenes in the COCO format')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    count = run_maker(make_dark, **vars(args))
    if count is not None:
        print(f'{args.out} has the {count} images of {args.source} in the dark; preview.png shows some.')


if __name__ == '__main__':
    main()
