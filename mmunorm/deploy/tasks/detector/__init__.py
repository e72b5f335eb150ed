"""Detectors of mmdet: images to boxes, classes and masks."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ....utils import PreflightError
from ...comparison import MIN_IOU, Comparison, largest_and_median
from ..base import Call
from ..features import Features
from .objects import detections
from .postprocess import detect


class Detector(Features):
    """Its graph and its parts need mmdet, its files do not."""
    name = 'detector'

    def graph(self, model: nn.Module) -> nn.Module:
        from .graph import DetectorGraph, obstacle
        if reason := obstacle(model):
            raise PreflightError(f'{type(model).__name__} cannot be exported whole: {reason}. With --parts backbone in '
                                 'onnx or openvino, backbone and neck become a file, and the rest stays in torch.')
        return DetectorGraph(model)

    def parts(self, graph: nn.Module, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        from .graph import parts_of
        if graph.pixels.enhancing is not None:
            raise PreflightError(f'this format does not support {type(graph.pixels.enhancing).__name__}, whose output '
                                 'would depend on the padding.')
        if min(pad := graph.settings['pad']) < 0 or max(pad) > 255:
            raise PreflightError('the input is the bytes of an image, and the pad_value of the data_preprocessor is '
                                 f'the pixel {pad}.')
        return parts_of(graph, images)

    def first(self, meta: dict, images: np.ndarray, sizes: np.ndarray) -> tuple[str, np.ndarray]:
        """`features`, and images padded with the pixel that normalizes to mmdet's `pad_value`."""
        padded = np.empty((len(images), *images.shape[2:], 3), np.float32)
        padded[:] = meta['detector']['pad']
        for target, image, (height, width) in zip(padded, images, sizes.astype(int), strict=True):
            target[:height, :width] = image[:, :height, :width].transpose(1, 2, 0)
        return 'features', padded

    @torch.no_grad()
    def run(self, meta: dict, call: Call, images: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        def run(part: str, regions: Tensor, found: Tensor) -> dict[str, Tensor]:
            """Runs a part on the regions that are found alone; the outputs of the others are 0."""
            outs = _channels_first(call(part, regions[found].permute(0, 2, 3, 1).contiguous().numpy()))
            return {name: out.new_zeros(len(found), *out.shape[1:]).index_put((found.nonzero()[:, 0], ), out)
                    for name, out in outs.items()}

        features = _channels_first(call(*self.first(meta, images, sizes)))
        outs = [detect(meta['detector'], run, {name: values[index:index + 1] for name, values in features.items()},
                       torch.from_numpy(sizes[index:index + 1])) for index in range(len(images))]
        return [torch.cat(values).numpy() for values in zip(*outs, strict=True)]

    def predict(self, sample, outputs: dict[str, np.ndarray], meta: dict) -> None:
        """Writes the outputs for an image to a data sample of OpenMMLab."""
        from mmengine.structures import InstanceData
        found = detections(outputs, meta, sample.scale_factor, *sample.ori_shape)
        fields = dict(bboxes=found.boxes, scores=found.scores, labels=found.labels, masks=found.masks)
        sample.pred_instances = InstanceData(**{name: torch.from_numpy(value) for name, value in fields.items()
                                                if value is not None})

    def differences(self, got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Comparison:
        """Compares the :func:`matches` of each image."""
        distances, num_found, num_expected = [], 0, 0
        for image in range(len(expected['dets'])):
            a, b = ({name: array[image][side['dets'][image, :, 4] > 0] for name, array in side.items()}
                    for side in (got, expected))
            num_found, num_expected = num_found + len(a['dets']), num_expected + len(b['dets'])
            for i, j in matches(a, b):
                boxes = np.abs(a['dets'][i] - b['dets'][j])
                mask = [np.abs(a['masks'][i] - b['masks'][j]).mean()] if 'masks' in expected else []
                distances.append([boxes[4], boxes[:4].max(), *mask])
        kinds = dict(zip(('scores', 'boxes', 'masks'), np.transpose(distances), strict=False))
        return Comparison(*largest_and_median(kinds), {}, num_expected, num_found, len(distances))


def _channels_first(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).movedim(-1, 1) for name, array in arrays.items()}


def matches(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Pairs of detections of one image, by `dets` `(n, 5)` and `labels` `(n, )`: of the same class, in any order.

    Each is matched once, so that the sum of IoUs, which are at least 0.5, is largest; among equal boxes by their score.
    """
    from scipy.optimize import linear_sum_assignment  # comes with mmdet
    from torchvision.ops import box_iou
    overlap = box_iou(torch.from_numpy(a['dets'][:, :4]), torch.from_numpy(b['dets'][:, :4])).numpy()
    can_match = (overlap >= MIN_IOU) & (a['labels'][:, None] == b['labels'])
    difference = np.abs(a['dets'][:, None, 4] - b['dets'][:, 4])
    pairs = linear_sum_assignment(np.where(can_match, overlap - 1e-6 * difference, 0), maximize=True)
    return [(i, j) for i, j in zip(*pairs, strict=True) if can_match[i, j]]
