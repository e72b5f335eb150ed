"""Makes the handwritten-digit data sets of projects/digits: COCO scenes and ImageNet folders."""
from mmunorm.cli.arguments import command
from projects.digits.digits.data_tools import add_size_arguments, data_parser, run_maker
from projects.digits.digits.maker import make_digits


def parse_args(argv=None):
    parser = data_parser(
        'Write scenes of handwritten digits in the COCO format (OUT/coco) and single digits in ImageNet folders '
        '(OUT/imagenet), from data that scikit-learn bundles.', 'data/digits')
    add_size_arguments(parser, train_images=6000)
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    out, size, side = args.out, args.scene_size, args.image_size
    counts = run_maker(make_digits, **vars(args))
    if counts is None:
        return
    print(f'{out}/coco      {args.train_scenes} train scenes with {counts["train"]} digits, '
          f'{args.val_scenes} val scenes with {counts["val"]}, {size}x{size} pixels')
    print(f'{out}/imagenet  {args.train_images} train and {args.val_images} val images, {side}x{side} pixels')
    print(f'{out}/preview.png shows val scenes with their boxes and masks.')


if __name__ == '__main__':
    main()
