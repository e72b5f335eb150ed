"""Cut unlabelled crops of photographs and other images, to calibrate and adapt a converted model on."""
from mmunorm.cli.arguments import command, positive
from projects.digits.digits.data_tools import data_parser, run_maker
from projects.photographs.photographs.crops import SPLITS, make_crops


def parse_args(argv=None):
    parser = data_parser(
        __doc__, 'data/crops', 'Without --images, apt fetches packages of Debian (1.2 GB) from the sources of this '
        'system, as an ordinary user, installs nothing and unpacks them in debian_images beside OUT.')
    parser.add_argument('--images', metavar='DIR', nargs='+', default=[], help='folders of your own images instead')
    parser.add_argument('--size', type=positive, default=256, help='side of a crop in pixels')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    counts = run_maker(make_crops, **vars(args))
    if counts is None:
        return
    for split in SPLITS:
        print(f'{args.out}/{split:5} {counts["crops"][split]} crops of {counts["images"][split]} images')
    print(f'{args.out}/README.md names the images and their checksums.')


if __name__ == '__main__':
    main()
