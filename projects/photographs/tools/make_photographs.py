"""Make the photographs: cut-out objects on photographs, as COCO scenes and ImageNet folders."""
import argparse

from mmunorm.cli.arguments import command
from mmunorm.utils import PreflightError
from projects.photographs.photographs.photographs import CLASSES, SPLITS, make_photographs


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog='apt fetches the images (320 MB) from the package sources of this system, as an ordinary user, '
        'installs nothing and unpacks them in debian_images beside OUT, unless --stamps and --backgrounds say where.')
    parser.add_argument('--out', default='data/photographs', help='folder to write')
    parser.add_argument('--stamps', metavar='DIR',
                        help="folder of tuxpaint's stamps, such as /usr/share/tuxpaint/stamps")
    parser.add_argument('--backgrounds', metavar='DIR', nargs='+', default=[],
                        help='folders that have the wallpapers, such as /usr/share/wallpapers /usr/share/backgrounds')
    parser.add_argument('--seed', type=int, default=0, help='seed of all random choices')
    parser.add_argument('--train-scenes', type=int, default=1500, help='COCO train images')
    parser.add_argument('--val-scenes', type=int, default=200, help='COCO val images, and as many test images')
    parser.add_argument('--scene-size', type=int, default=128, help='side of a scene in pixels')
    parser.add_argument('--train-images', type=int, default=12000, help='classification images')
    parser.add_argument('--val-images', type=int, default=1000, help='classification images, and as many of test')
    parser.add_argument('--image-size', type=int, default=32, help='side of a classification image in pixels')
    parser.add_argument('--force', action='store_true',
                        help='overwrite OUT, with everything in it, if this tool made it')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = vars(parse_args(argv))
    out = args['out']
    if (args['stamps'] is None) != (not args['backgrounds']):
        raise PreflightError('--stamps and --backgrounds belong together: give both, or none of them.')
    try:
        counts = make_photographs(**args)
    except ValueError as error:  # begins with the name of a setting
        raise PreflightError(f'--{error}.'.replace('_', '-')) from error
    if counts is None:
        print(f'{out} is already there, made with these settings.')
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
