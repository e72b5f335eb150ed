"""Draws an exported model's predictions on one or many images, without building a torch model."""
import argparse

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
import cv2
import mmcv
import numpy as np

from mmunorm.cli.arguments import command, out_folder, positive, share
from mmunorm.cli.images import draw_each, drawing_scale, find_images
from mmunorm.deploy.exported import ExportedModel


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('file', help='a file from tools/deploy/export.py')
    parser.add_argument('images', help='an image, or a folder that is searched for images')
    parser.add_argument('--out-dir', required=True, help='folder for the drawn images')
    parser.add_argument('--score-thr', type=share, default=0.3, help='draw objects with at least this score')
    parser.add_argument('--limit', type=positive, help='draw at most so many images of a folder, the first ones')
    return parser.parse_args(argv)


def draw(runner, image, score_thr):
    """The image, enlarged until letters can be read, with what the model sees in it."""
    scale = drawing_scale(*image.shape[:2])
    large = mmcv.imrescale(image, scale)

    def write(label, score, x, y, colour):
        text = f'{runner.classes[label] if label < len(runner.classes) else label} {score:.2f}'
        for outline, thickness in (((0, 0, 0), 3), (colour, 1)):
            cv2.putText(large, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.4, outline, thickness, cv2.LINE_AA)

    if not runner.is_detector:
        scores = runner.classify(image)
        large = cv2.copyMakeBorder(large, 0, 24, 0, 0, cv2.BORDER_CONSTANT)
        write(int(scores.argmax()), scores.max(), 4, large.shape[0] - 7, (255, 255, 255))
        return large
    found = runner.detect(image, score_thr)
    for index in reversed(range(len(found.scores))):  # the best on top
        label = int(found.labels[index])
        # Neighbours in the list of classes get hues that are far from each other.
        colour = cv2.cvtColor(np.uint8([[[label * 111 % 180, 200, 255]]]), cv2.COLOR_HSV2BGR)[0, 0]
        if found.masks is not None:
            inside = cv2.resize(found.masks[index].astype('uint8'), large.shape[1::-1]) > 0
            large[inside] = large[inside] // 2 + colour // 2
        x1, y1, x2, y2 = (found.boxes[index] * scale).round().astype(int).tolist()
        cv2.rectangle(large, (x1, y1), (x2, y2), colour.tolist(), 1)
        write(label, found.scores[index], x1 + 2, y1 + 12, colour.tolist())
    return large


@command
def main(argv=None):
    args = parse_args(argv)
    images = find_images(args.images, args.out_dir, args.limit)
    runner = ExportedModel(args.file)
    out_folder(args.out_dir, '--out-dir')

    def write(path, image, part):
        cv2.imwrite(str(part), draw(runner, image, args.score_thr))

    draw_each(images, write, args.out_dir)


if __name__ == '__main__':
    main()
