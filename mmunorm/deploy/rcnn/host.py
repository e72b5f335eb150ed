"""The steps of a detector between and after the parts that run on a chip, in numpy only.

Every function does for one image what its namesake in :mod:`.detector` does for a batch. Dropped boxes are removed
until the last step. This file does not depend on the package, so it can be copied.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

LARGEST_LOG_RATIO = np.float32(abs(np.log(16 / 1000)))  # of the sides of two boxes, in mmdet's coder
TINY = np.float32(1e-6)  # for sides of 0


class Host:
    """A detector whose network runs elsewhere.

    Args:
        settings (dict): the result of :func:`mmunorm.deploy.rcnn.parts.settings_of`.
        run (Callable): `run(part, array)` runs a part of :func:`mmunorm.deploy.rcnn.parts.parts_of` on a channels-last
            float32 input, and returns its float32 outputs by name. All but `features` take any number of regions.
    """

    def __init__(self, settings: dict, run: Callable[[str, np.ndarray], dict[str, np.ndarray]]):
        self.settings, self.run = settings, run

    def __call__(self, images: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        """Detects the objects in each image of a batch.

        `images` `(N, 3, H, W)` float32, 0 to 255, may have any padding on the right and at the bottom; `sizes` `(N, 2)`
        float32 are height and width without padding. Returns `dets` `(N, K, 5)` float32, `labels` `(N, K)` int64 and,
        with a mask head, `masks` `(N, K, h, w)` float32, like `RCNN` of :mod:`.detector`.
        """
        features = self.run('features', self.pad(images, sizes))
        batch = [self.detect({name: each[index] for name, each in features.items()}, size)
                 for index, size in enumerate(sizes)]
        return [np.stack(each) for each in zip(*batch, strict=True)]

    def pad(self, images: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Images padded with the pixel that normalizes to mmdet's `pad_value`; channels last."""
        padded = np.empty((len(images), *images.shape[2:], 3), np.float32)
        padded[:] = self.settings['pad']
        for own, image, (height, width) in zip(padded, images, sizes.astype(int), strict=True):
            own[:height, :width] = image[:, :height, :width].transpose(1, 2, 0)
        return padded

    def detect(self, features: dict[str, np.ndarray], size: np.ndarray) -> tuple[np.ndarray, ...]:
        """The outputs for one image, given those of `features`."""
        heads, masks, logits = self.settings['heads'], self.settings['masks'], []
        if heads is None:
            return single_stage(features, size, self.settings)
        boxes = propose(features, size, self.settings)
        maps = [features[name] for name in sorted(features) if name.startswith('map')]
        for stage, cfg in enumerate(self.settings.get('refine', ())):
            found = self.run(f'refine{stage}', pool(maps, boxes, cfg['pool']))
            logits.append(found['logits'])
            boxes = refine(boxes, found['logits'], found['deltas'], size, cfg['coder'])
        found = self.run('heads', pool(maps, boxes, heads['pool']))
        logits = np.mean([*logits, found['logits']], 0)
        boxes, scores, classes = suppress_classes(boxes, logits, found['deltas'], size, heads)
        number = heads['most']
        outputs = detections(boxes, scores, classes, number)
        if masks is None:
            return outputs
        drawn = self.run('masks', pool(maps, boxes, masks['pool']))['logits']
        if masks['any_class']:
            classes = np.zeros_like(classes)
        stages = np.arange(drawn.shape[3]).reshape(len(self.settings.get('refine', ())) + 1, -1)
        drawn = [drawn[np.arange(len(boxes)), :, :, own[classes]] for own in stages]
        return *outputs, filled(sigmoid(np.stack(drawn)).mean(0), number)


def detections(boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray, number: int) -> tuple[np.ndarray, ...]:
    """`dets` and `labels` of an image, filled with zeros."""
    return filled(np.column_stack([boxes, scores]).astype(np.float32), number), filled(classes, number)


def single_stage(features: dict[str, np.ndarray], size: np.ndarray, settings: dict) -> tuple[np.ndarray, ...]:
    """`SingleStage` for an image: `dets` and `labels`."""
    cfg = settings['proposals']
    boxes, scores, classes = map(np.concatenate, zip(*candidates(features, size, settings), strict=True))
    step = np.where(scores[:, None] > 0, boxes, 0).max(initial=0) + 1
    kept = nms(boxes + (classes.astype(np.float32) * step)[:, None], scores, cfg['iou'])[:cfg['most']]
    return detections(boxes[kept], scores[kept], classes[kept], cfg['most'])


def candidates(features: dict[str, np.ndarray], size: np.ndarray, settings: dict) -> list[tuple[np.ndarray, ...]]:
    """Boxes `(P, 4)`, scores and classes `(P, )` of each level."""
    cfg, found = settings['proposals'], []
    for level, anchors in enumerate(settings['anchors']):
        score, delta = features[f'score{level}'], features[f'delta{level}'].reshape(-1, 4)
        prior = priors(anchors, *score.shape[:2])
        classes = score.size // len(prior)
        score = sigmoid(score.flatten())
        best = np.flatnonzero(score > cfg.get('score', 0))
        if cfg['before'] > 0:
            best = best[largest(score[best], cfg['before'])]
        score, place = score[best], best // classes
        boxes = decode(prior[place], delta[place][:, None], size, cfg['coder'])[:, 0]
        score = np.where((boxes[:, 2:] - boxes[:, :2] > cfg['least']).all(1) | (cfg['least'] < 0), score, 0)
        found.append((boxes, score, best % classes))
    return found


def propose(features: dict[str, np.ndarray], size: np.ndarray, settings: dict) -> np.ndarray:
    """The proposals `(P, 4)`, by descending score."""
    cfg, boxes, scores = settings['proposals'], [], []
    for own, score, _ in candidates(features, size, settings):
        kept = nms(own, score, cfg['iou'])
        boxes.append(own[kept])
        scores.append(score[kept])
    return np.concatenate(boxes)[largest(np.concatenate(scores), cfg['most'])]


def refine(boxes: np.ndarray, logits: np.ndarray, deltas: np.ndarray, size: np.ndarray, coder: dict) -> np.ndarray:
    """The boxes `(P, 4)` moved by the deltas of their best class, or by the only ones."""
    deltas = deltas.reshape(len(deltas), deltas.shape[1] // 4, 4)
    best = logits[:, :-1].argmax(1) if deltas.shape[1] > 1 else 0
    return decode(boxes, deltas[np.arange(len(deltas)), best][:, None], size, coder)[:, 0]


def priors(anchors: dict, height: int, width: int) -> np.ndarray:
    """The anchors `(height * width * A, 4)` of a map: `AnchorGenerator.single_level_grid_priors`."""
    step_x, step_y = anchors['stride']
    y, x = np.mgrid[:height, :width].astype(np.float32) * np.float32([[[step_y]], [[step_x]]])
    return (np.stack([x, y, x, y], -1)[:, :, None] + np.float32(anchors['boxes'])).reshape(-1, 4)


def suppress_classes(proposals: np.ndarray, logits: np.ndarray, deltas: np.ndarray, size: np.ndarray,
                     cfg: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes `(n, 4)`, scores and classes `(n, )` after NMS for each class, by descending score."""
    scores = softmax(logits)[:, :-1]
    deltas = deltas.reshape(len(deltas), deltas.shape[1] // 4, 4)
    boxes = decode(proposals, deltas, size, cfg['coder'])
    boxes = np.broadcast_to(boxes, (*scores.shape, 4))
    scores = np.where(scores > cfg['score'], scores, 0)
    kept = [nms(boxes[:, index], scores[:, index], cfg['iou']) for index in range(cfg['classes'])]
    classes = np.repeat(np.arange(cfg['classes']), [len(each) for each in kept])
    rows = np.concatenate(kept)
    best = largest(scores[rows, classes], cfg['most'])
    rows, classes = rows[best], classes[best]
    return boxes[rows, classes], scores[rows, classes], classes


def decode(boxes: np.ndarray, deltas: np.ndarray, size: np.ndarray, coder: dict) -> np.ndarray:
    """`DeltaXYWHBBoxCoder.decode`: boxes `(P, n, 4)` inside an image, from boxes `(P, 4)` and deltas `(P, n, 4)`."""
    deltas = deltas * np.float32(coder['stds']) + np.float32(coder['means'])
    corner, sides = boxes[:, None, :2], boxes[:, None, 2:] - boxes[:, None, :2]
    move, grow = sides * deltas[..., :2], np.minimum(deltas[..., 2:], LARGEST_LOG_RATIO)
    if coder['furthest'] is None:
        grow = np.maximum(grow, -LARGEST_LOG_RATIO)
    else:
        move = np.clip(move, -coder['furthest'], coder['furthest'])
    center, half = corner + sides / 2 + move, sides * np.exp(grow) / 2
    moved = np.concatenate([center - half, center + half], -1)
    if coder['clip']:
        height, width = size
        moved = np.clip(moved, 0, np.float32([width, height, width, height]))
    return moved


def nms(boxes: np.ndarray, scores: np.ndarray, iou_threshold: float) -> np.ndarray:
    """Indices of the boxes `(n, 4)` that greedy NMS keeps, by descending score; boxes with score 0 are padding."""
    order = largest(scores, len(scores))
    left, top, right, bottom = boxes[order].T.copy()
    area = (right - left) * (bottom - top)
    kept, dropped = [], np.zeros(len(order), bool)
    for i in range(len(order)):
        if dropped[i]:
            continue
        kept.append(i)
        rest = slice(i + 1, None)
        width = np.minimum(right[i], right[rest]) - np.maximum(left[i], left[rest])
        height = np.minimum(bottom[i], bottom[rest]) - np.maximum(top[i], top[rest])
        common = np.maximum(width, 0) * np.maximum(height, 0)
        overlap = common / np.maximum(area[i] + area[rest] - common, TINY)
        dropped[rest] |= overlap.astype(float) > iou_threshold
    return order[kept]


def largest(scores: np.ndarray, most: int) -> np.ndarray:
    """Indices of the `most` largest scores above 0, in descending order."""
    order = np.argsort(-scores, kind='stable')[:most]
    return order[scores[order] > 0]


def pool(maps: list[np.ndarray], boxes: np.ndarray, cfg: dict) -> np.ndarray:
    """The features `(P, h, w, C)` in boxes `(P, 4)`, each from the level for its size: `SingleRoIExtractor`.

    RoIAlign's samples are on a grid, so a region is two small matrix products, one along each axis.
    """
    sides = boxes[:, 2:] - boxes[:, :2]
    scale = np.sqrt(sides.prod(1)) / np.float32(cfg['finest']) + TINY
    levels = sum((scale >= 2**level for level in range(1, len(cfg['scales']))), np.zeros(len(boxes), int))
    pooled = np.empty((len(boxes), *cfg['size'], maps[0].shape[-1]), np.float32)
    half = np.float32(0.5 if cfg['aligned'] else 0)
    for level, factor in enumerate(cfg['scales']):
        feature, own = maps[level], np.flatnonzero(levels == level)
        start = boxes[own, :2] * np.float32(factor) - half
        sides = boxes[own, 2:] * np.float32(factor) - half - start
        if not cfg['aligned']:
            sides = np.maximum(sides, 1)
        bins = sides / np.float32(cfg['size'][::-1])
        samples = np.full(bins.shape, cfg['samples']) if cfg['samples'] > 0 else np.ceil(bins).astype(int)
        for index, (x, y), (wide, high), (across, down) in zip(own, start, bins, samples, strict=True):
            top, rows = weights(y, high, cfg['size'][0], down, feature.shape[0])
            left, columns = weights(x, wide, cfg['size'][1], across, feature.shape[1])
            part = feature[top:top + rows.shape[1], left:left + columns.shape[1]]
            part = np.matmul(columns, part).reshape(len(part), -1)
            np.matmul(rows, part, out=pooled[index].reshape(len(rows), -1))
    return pooled


def weights(start: np.float32, bin_size: np.float32, bins: int, samples: int, length: int) -> tuple[int, np.ndarray]:
    """The weights of RoIAlign's sample means along one side of a region.

    Returns the first cell with a weight, and `(bins, cells)` float32.
    """
    if not samples:  # an empty region
        return 0, np.zeros((bins, 1), np.float32)
    position = start + bin_size * ((np.arange(bins * samples, dtype=np.float32) + np.float32(0.5)) / samples)
    inside = (position >= -1) & (position <= length)
    position = np.clip(position, 0, length - 1)
    first, last = int(position[0]), int(np.ceil(position[-1]))
    share = 1 - np.abs(position[:, None] - np.arange(first, last + 1))
    share = np.maximum(share, 0) * inside[:, None] / samples
    return first, share.reshape(bins, samples, -1).sum(1).astype(np.float32)


def filled(array: np.ndarray, number: int) -> np.ndarray:
    """An array padded with zeros to this size of the first dimension."""
    return np.concatenate([array, np.zeros((number - len(array), *array.shape[1:]), array.dtype)])


def softmax(logits: np.ndarray) -> np.ndarray:
    """The softmax of each row of `(n, classes)`."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """The sigmoid of float32, without overflow."""
    return (0.5 * np.tanh(0.5 * x) + 0.5).astype(np.float32)
