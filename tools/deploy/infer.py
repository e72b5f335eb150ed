"""Draws an exported model's predictions on one or many images, without building a torch model."""
import argparse

from mmunorm.cli.arguments import command, fraction, out_folder, positive
from mmunorm.cli.images import draw_images, draw_predictions, find_images
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.utils import PreflightError


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('file', help='a file from tools/deploy/export.py')
    parser.add_argument('images', help='an image, or a folder that is searched for images')
    parser.add_argument('--out-dir', required=True, help='folder for the drawn images')
    parser.add_argument('--pred-score-thr', '--score-thr', type=fraction, default=0.3,
                        help='draw objects with at least this score (default: %(default)s)')
    parser.add_argument('--limit', type=positive, help='draw only the first LIMIT images of a folder')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    images = find_images(args.images, args.out_dir, args.limit)
    runner = ExportedModel(args.file)
    if runner.meta['task'] == 'features':
        raise PreflightError(f'{args.file} has a backbone alone: tools/infer.py draws what the whole model sees.')
    out_folder(args.out_dir, '--out-dir')

    def predict(path, image):
        return draw_predictions(runner, image, args.pred_score_thr), None

    draw_images(images, predict, args.out_dir, loading=runner.loading)


if __name__ == '__main__':
    main()
