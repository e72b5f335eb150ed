"""Makes the data sets of configs/photographs: cut-out objects on photographs, COCO scenes and ImageNet folders."""
import argparse

from mmunorm.cli.arguments import command
from mmunorm.datasets.photographs import CLASSES, SPLITS, make_photographs
from mmunorm.utils import PreflightError


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Without --stamps and --backgrounds, apt downloads the images (320 MB) from this system's package "
        'sources, without root and without installing them, and unpacks them in debian_images next to OUT.')
    parser.add_argument('--out', default='data/photographs', help='output folder')
    parser.add_argument('--stamps', metavar='DIR',
                        help="folder of tuxpaint's stamps, such as /usr/share/tuxpaint/stamps")
    parser.add_argument('--backgrounds', metavar='DIR', nargs='+', default=[],
                        help='folders of wallpapers, such as /usr/share/wallpapers /usr/share/backgrounds')
    parser.add_argument('--seed', type=int, default=0, help='seed of all random choices')
    parser.add_argument('--train-scenes', type=int, default=1500, help='COCO train images')
    parser.add_argument('--val-scenes', type=int, default=200, help='COCO val images, and as many test images')
    parser.add_argument('--scene-size', type=int, default=128, help='side of a scene in pixels')
    parser.add_argument('--train-images', type=int, default=12000, help='classification images')
    parser.add_argument('--val-images', type=int, default=1000, help='classification images, and as many of test')
    parser.add_argument('--image-size', type=int, default=32, help='side of a classification image in pixels')
    parser.add_argument('--force', action='store_true',
                        help='overwrite the whole folder OUT if this tool created it')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = vars(parse_args(argv))
    out = args['out']
    if (args['stamps'] is None) != (not args['backgrounds']):
        raise PreflightError('--stamps and --backgrounds must be given together.')
    try:
        counts = make_photographs(**args)
    except ValueError as error:  # begins with the name of a setting
        raise PreflightError(f'--{error}.'.replace('_', '-')) from error
    if counts is None:
        print(f'{out} already exists with these settings.')
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
