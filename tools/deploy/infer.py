"""Draws an exported model's predictions on one or many pictures, without building a torch model."""
import argparse

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
import cv2
import mmcv

from mmunorm.cli.arguments import command, out_folder, positive
from mmunorm.cli.pictures import draw_each, drawing_scale, find_images
from mmunorm.deploy.drawing import draw_class, draw_detections
from mmunorm.deploy.runner import Runner


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('file', help='a file from tools/deploy/export.py')
    parser.add_argument('pictures', help='a picture, or a folder that is searched for pictures')
    parser.add_argument('--out-dir', required=True, help='folder for the drawn pictures')
    parser.add_argument('--score-thr', type=float, default=0.3, help='draw objects with at least this score')
    parser.add_argument('--limit', type=positive, help='draw at most so many pictures of a folder, the first ones')
    return parser.parse_args(argv)


def draw(runner, picture, score_thr):
    """The picture, enlarged until letters can be read, with what the model sees in it."""
    scale = drawing_scale(*picture.shape[:2])
    large = mmcv.imrescale(picture, scale)
    if not runner.is_detector:
        return draw_class(large, runner.classify(picture), runner.classes)
    found = runner.detect(picture, score_thr)
    found.boxes *= scale
    if found.masks is not None:
        found.masks = [cv2.resize(mask.astype('uint8'), large.shape[1::-1]) > 0 for mask in found.masks]
    return draw_detections(large, found, runner.classes)


@command
def main(argv=None):
    args = parse_args(argv)
    images = find_images(args.pictures, args.out_dir, args.limit)
    runner = Runner(args.file)
    out_folder(args.out_dir, '--out-dir')

    def write(path, picture, part):
        cv2.imwrite(str(part), draw(runner, picture, args.score_thr))

    draw_each(images, write, args.out_dir)


if __name__ == '__main__':
    main()
