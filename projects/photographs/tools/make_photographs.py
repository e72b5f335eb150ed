"""Make the photographs: cut-out objects on photographs, as COCO scenes and ImageNet folders."""
from mmunorm.cli.arguments import command
from mmunorm.utils import PreflightError
from projects.digits.digits.data_tools import add_size_arguments, data_parser, run_maker
from projects.photographs.photographs.photographs import CLASSES, SPLITS, make_photographs


def parse_args(argv=None):
    parser = data_parser(
        __doc__, 'data/photographs', 'apt fetches the images (320 MB) from the package sources of this system, as an '
        'ordinary user, installs nothing and unpacks them in debian_images beside OUT, unless --stamps and '
        '--backgrounds say where.')
    parser.add_argument('--stamps', metavar='DIR',
                        help="folder of tuxpaint's stamps, such as /usr/share/tuxpaint/stamps")
    parser.add_argument('--backgrounds', metavar='DIR', nargs='+', default=[],
                        help='folders that have the wallpapers, such as /usr/share/wallpapers /usr/share/backgrounds')
    add_size_arguments(parser, train_images=12000, more=', and as many of test')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = vars(parse_args(argv))
    out = args['out']
    if (args['stamps'] is None) != (not args['backgrounds']):
        raise PreflightError('--stamps and --backgrounds must be given together.')
    counts = run_maker(make_photographs, **args)
    if counts is None:
        return
    size, side = args['scene_size'], args['image_size']
    for split in SPLITS:
        count = {kind: args[f'{"train" if split == "train" else "val"}_{kind}'] for kind in ('scenes', 'images')}
        print(f'{split:5} {count["scenes"]} scenes of {size}x{size} pixels with {counts["objects"][split]} objects, '
              f'{count["images"]} images of {side}x{side}, from {counts["stamps"][split]} stamps and '
              f'{counts["backgrounds"][split]} backgrounds')
    print(f'{out} has {len(CLASSES)} kinds: {", ".join(CLASSES)}. README.md names licences and checksums, preview.png '
          'shows val scenes.')


if __name__ == '__main__':
    main()
