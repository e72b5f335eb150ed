"""Detectors of mmdet: images to boxes, classes and masks."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ....utils import PreflightError
from ...comparison import MIN_IOU, Comparison, largest_and_median
from ..base import Call
from ..features import Features
from .host import detections, padded, run_parts


class Detector(Features):
    """Its graph and its parts need mmdet, its files do not."""
    name = 'detector'

    def graph(self, model: nn.Module) -> nn.Module:
        from .graph import DetectorGraph, obstacle
        if reason := obstacle(model):
            raise PreflightError(f'{type(model).__name__} cannot be exported whole: {reason}. With --parts backbone in '
                                 'onnx or openvino, backbone and neck become a file, and the rest stays in torch.')
        return DetectorGraph(model)

    def meta(self, model: nn.Module) -> dict:
        if not getattr(getattr(model, 'roi_head', None), 'with_mask', False):
            return {}
        return dict(mask_threshold=model.roi_head.test_cfg.mask_thr_binary)

    def parts(self, graph: nn.Module, images: Tensor) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        from .graph import parts_of
        if graph.pixels.enhancing is not None:
            raise PreflightError(f'this format does not support {type(graph.pixels.enhancing).__name__}, whose output '
                                 'would depend on the padding.')
        pad = graph.settings['pad']
        if not all(0 <= pixel <= 255 for pixel in pad):
            raise PreflightError('the input is the bytes of an image, and the pad_value of the data_preprocessor is '
                                 f'the pixel {pad}.')
        return parts_of(graph, images)

    def first(self, meta: dict, *arrays: np.ndarray) -> tuple[str, np.ndarray]:
        return 'features', padded(meta, *arrays)

    def run(self, meta: dict, call: Call, *arrays: np.ndarray) -> list[np.ndarray]:
        return run_parts(meta, call, *arrays)

    def predict(self, sample, outputs: dict[str, np.ndarray], meta: dict) -> None:
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


def matches(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Pairs of detections of one image, by `dets` `(n, 5)` and `labels` `(n, )`: of the same class, in any order.

    Each is matched once, by the best IoU of at least 0.5, then the nearest score.
    """
    from torchvision.ops import box_iou
    overlap = box_iou(torch.from_numpy(a['dets'][:, :4]), torch.from_numpy(b['dets'][:, :4])).numpy()
    overlap[a['labels'][:, None] != b['labels'][None]] = 0
    difference = np.abs(a['dets'][:, None, 4] - b['dets'][None, :, 4])
    rows, columns = np.nonzero(overlap >= MIN_IOU)
    order = np.lexsort((difference[rows, columns], -overlap[rows, columns]))
    pairs = {}
    for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    return list(pairs.items())
