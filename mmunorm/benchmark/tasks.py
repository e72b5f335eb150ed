"""The benchmarked tasks: a classifier up to its logits, or a detector up to boxes and masks."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mmengine.config import Config
from torch import Tensor, nn

from ..modules import tensors_in
from ..utils import PreflightError

# The number of boxes per image above the score threshold of a two-stage detector. On noise, a trained detector finds
# no boxes, and an untrained one finds boxes everywhere. The cost of masks depends on their number.
CANDIDATES = 50


class ClassifierTask:
    """A classifier from normalized images to logits."""
    about = 'backbone, neck and head, from normalized images on the device to logits'
    default_batch_size = {'cpu': 4, 'cuda': 128}
    paper = dict(batch_size=512, shape=(224, 224), repeat=1000)

    @staticmethod
    def default_shape(cfg: Config, device_type: str) -> tuple[int, int]:
        """Height and width."""
        side = cfg.model.backbone.get('img_size', 224)
        return (side, side) if isinstance(side, int) else tuple(side)

    def load(self, model: nn.Module, images: Sequence[Tensor]) -> None:
        """Prepares the inputs of all models with the data preprocessor of one; images are uint8 `(3, H, W)`."""
        self.images = model.data_preprocessor(dict(inputs=list(images)), False)['inputs']

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """The outputs that folding must not change: the logits."""
        return list(tensors_in(model(self.images, mode='tensor')))

    def equalize(self, model: nn.Module, reference: Sequence[Tensor], models: Sequence[nn.Module]) -> list[str]:
        """Gives all `models` the work of `model`, whose outputs are `reference`, and returns notes."""
        return []

    def run(self, model: nn.Module):
        """The timed function."""
        return model(self.images, mode='tensor')

    def compile(self, model: nn.Module) -> str:
        """Compiles what `run` calls, in place; returns its description."""
        model.compile()
        return 'the whole model'


class DetectorTask(ClassifierTask):
    """A detector's test step: backbone, neck, RPN, RoI heads, NMS, and masks pasted into the image."""
    about = ('backbone, neck, RPN, RoI heads and post-processing, from normalized images on the device to '
             'boxes and pasted masks')
    default_batch_size = {'cpu': 1, 'cuda': 2}
    paper = dict(batch_size=2, shape=(800, 1333), repeat=1000)

    @staticmethod
    def default_shape(cfg: Config, device_type: str) -> tuple[int, int]:
        return (320, 512) if device_type == 'cpu' else (800, 1333)

    def load(self, model: nn.Module, images: Sequence[Tensor]) -> None:
        from mmdet.structures import DetDataSample
        size = tuple(images[0].shape[-2:])
        samples = [DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1., 1.))) for _ in images]
        data = model.data_preprocessor(dict(inputs=list(images), data_samples=samples), False)
        self.images, self.samples = data['inputs'], data['data_samples']

    def outputs(self, model: nn.Module) -> list[Tensor]:
        # The maps of the neck; the order of two boxes with nearly equal scores depends on rounding.
        return list(tensors_in(model.extract_feat(self.images)))

    def equalize(self, model: nn.Module, reference: Sequence[Tensor], models: Sequence[nn.Module]) -> list[str]:
        """Gives the heads of all models the same maps, hence the same proposals, boxes and masks."""
        def overwrite(extract: Callable, images: Tensor):
            features = extract(images)
            # In place, so that the model's own maps stay in memory for the usual time.
            for feature, replacement in zip(tensors_in(features), reference, strict=True):
                feature.copy_(replacement)
            return features

        for other in models:
            other.extract_feat = partial(overwrite, other.extract_feat)
        notes = ['The heads of all rows use the same feature maps, which overwrite those that the row '
                 'computed, so the work for proposals, boxes and masks is equal in all rows.']
        if (threshold := self._score_threshold(model)) is not None:
            for other in models:
                other.roi_head.test_cfg.score_thr = threshold
            notes.append('The images are noise, so the score threshold of the box head is set to '
                         f'{threshold:.4g}: {CANDIDATES} boxes per image pass it.')
        found = [sample.pred_instances for sample in self.run(model)]
        masks = ', with masks' if 'masks' in found[0] else ''
        return [*notes, f'Detections in a batch: {sum(map(len, found))}{masks}.']

    def _score_threshold(self, model: nn.Module) -> float | None:
        from mmdet.models.roi_heads.bbox_heads import BBoxHead
        head = getattr(getattr(model, 'roi_head', None), 'bbox_head', None)
        if not isinstance(head, BBoxHead) or head.custom_cls_channels:
            return None
        scores = []
        # A threshold that no box passes, so that NMS need not process all boxes of all classes.
        model.roi_head.test_cfg.score_thr = 1.0
        with head.register_forward_hook(lambda module, args, output: scores.append(output[0])):
            self.run(model)
        scores = scores[0].float().softmax(-1)[:, :-1].flatten()
        count = min(CANDIDATES * len(self.images), scores.numel() - 1)
        return float(scores.topk(count + 1).values[-1])

    def run(self, model: nn.Module):
        # New samples, because the results of the last run in old ones would be freed during this run.
        return model(self.images, [sample.new() for sample in self.samples], mode='predict')

    def compile(self, model: nn.Module) -> str:
        model.backbone.compile()
        if not model.with_neck:
            return 'the backbone'
        model.neck.compile()
        return 'the backbone and the neck, because the number of boxes is not known before a run'


def task_of(cfg: Config) -> ClassifierTask:
    """The task of a config, by its `default_scope`. Raises a PreflightError if that is of no known task."""
    tasks = {'mmpretrain': ClassifierTask, 'mmdet': DetectorTask}
    scope = cfg.get('default_scope')
    if scope not in tasks:
        raise PreflightError(f"default_scope must be 'mmdet' or 'mmpretrain', got {scope!r}.")
    return tasks[scope]()
