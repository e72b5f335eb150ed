"""Distillation from the LayerNorm model that a run starts from."""
from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmengine.dataset import pseudo_collate
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmpretrain.models.classifiers import BaseClassifier
from torch import Tensor, nn

from ..checkpoints.loading import load_weights
from ..config.models import build_model
from ..conversion import AdaptReport, adapt
from ..conversion.checkpoint import layer_norm_config
from ..conversion.statistics import error_over_variance
from ..norms.layers import norm_layers
from ..utils import PreflightError
from .runner import unwrapped_model

RATE = 1e-3  # of the adaptation, which lowers it if the loss rises


@HOOKS.register_module()
class DistillationHook(Hook):
    """Distils a teacher, the same model with LayerNorm.

    The loss is `(1 - weight) * loss + weight * distance`; the weighted distance is logged as `loss_distillation`. For a
    classifier the distance is `T^2 * KL(teacher, student)` of the logits at temperature T; for any other model the mean
    over the backbone's outputs of `|student - teacher|^2 / |teacher - mean(teacher)|^2`.

    The teacher gets the same batches as the student, after the data preprocessor and under the same autocast, without
    dropout. It is not part of the model: not in checkpoints, the optimizer or DistributedDataParallel.

    Args:
        checkpoint (str): path or URL of the teacher's checkpoint.
        norm_cfg (dict): config of the teacher's norms. Defaults to `dict(type='LN')`; a Vision Transformer of
            mmpretrain has `dict(type='LN', eps=1e-6)`. A model that lists its converted norms keeps its own.
        temperature (float): T. Defaults to 4.
        weight (float): from 0 to 1. Defaults to 0.5.

    Raises:
        PreflightError: the checkpoint cannot be read or is of another model, or the model has no backbone.
    """

    def __init__(self, checkpoint: str, norm_cfg: dict | None = None, temperature: float = 4., weight: float = 0.5):
        if not temperature > 0:
            raise ValueError(f'temperature must be a positive number, got {temperature!r}')
        if not 0 <= weight <= 1:
            raise ValueError(f'weight must be from 0 to 1, got {weight!r}')
        self.checkpoint = checkpoint
        self.norm_cfg = norm_cfg or dict(type='LN')
        self.temperature = temperature
        self.weight = weight

    def before_train(self, runner) -> None:
        student = unwrapped_model(runner)
        backbone = getattr(student, 'backbone', backbone_of(student))
        if backbone is None:
            raise PreflightError(f'DistillationHook: {type(student).__name__} has no backbone to compare.')
        self._is_classifier = isinstance(student, BaseClassifier)
        cfg = copy.deepcopy(runner.cfg)
        cfg.model = layer_norm_config(cfg.get('model') or {}, self.norm_cfg)
        with torch.random.fork_rng():  # the run's random numbers do not depend on the teacher
            teacher = build_model(cfg)
        load_weights(teacher, self.checkpoint)
        self._teacher = teacher.eval().requires_grad_(False).to(next(student.parameters()).device)
        read = getattr(student, 'head', backbone) if self._is_classifier else backbone
        self._handles = [read.register_forward_hook(self._store_output),
                         student.register_forward_hook(self._add_loss, with_kwargs=True)]
        self._output = None

    def after_train(self, runner) -> None:
        for handle in self._handles:
            handle.remove()
        del self._teacher

    def _store_output(self, module: nn.Module, args: tuple, output) -> None:
        self._output = getattr(output, 'logits', output)  # of a model of transformers

    def _add_loss(self, model: nn.Module, args: tuple, kwargs: dict, losses):
        """Adds the distance to the losses of a training step; other outputs do not change."""
        output, self._output = self._output, None
        if kwargs.get('mode') != 'loss':
            return None
        distance = self._distance(output, kwargs['inputs'] if 'inputs' in kwargs else args[0])
        weighted = {name: _scaled(value, 1 - self.weight) if 'loss' in name else value
                    for name, value in losses.items()}
        return {**weighted, 'loss_distillation': self.weight * distance}

    def _distance(self, output, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self._teacher(inputs) if self._is_classifier else self._teacher.backbone(inputs)
        if self._is_classifier:
            return logit_distance(output, wanted, self.temperature)
        return feature_distance(output, wanted)


def _scaled(value, factor: float):
    return [item * factor for item in value] if isinstance(value, (list, tuple)) else value * factor


def logit_distance(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """`T^2 * KL(softmax(teacher / T), softmax(student / T))`, mean over samples, `()`; logits are `(N, classes)`."""
    logs = F.log_softmax(student.float() / temperature, dim=-1)
    wanted = F.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(logs, wanted, reduction='batchmean', log_target=True)


def feature_distance(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """The squared error over the teacher's variance, mean over the feature maps, `()`."""
    pairs = ((a.float().flatten(), b.float().flatten()) for a, b in zip(student, teacher, strict=True))
    return torch.stack([error_over_variance(*pair) for pair in pairs]).mean()


def backbone_of(model: nn.Module) -> nn.Module | None:
    """The part of an OpenMMLab model that is adapted: the backbone, or else the child with all norms, if not frozen.

    The latter is the model of timm or transformers in a classifier of mmpretrain around it.
    """
    norms = {norm for _, norm in norm_layers(model)}
    parts = [model.backbone] if hasattr(model, 'backbone') else [
        child for child in model.children() if norms <= set(child.modules())]
    return next((part for part in parts if any(weight.requires_grad for weight in part.parameters())), None)


class _Inputs(Sequence):
    """Preprocessed images `(3, H, W)`, the inputs of a backbone; `paths` are those of their files."""

    def __init__(self, samples: Sequence[dict], preprocessor: nn.Module):
        self.samples, self.preprocessor = samples, preprocessor
        self.paths = getattr(samples, 'paths', None) or [
            sample['data_samples'].get('img_path') or f'image {i}' for i, sample in enumerate(samples)]

    def __len__(self) -> int:
        return len(self.samples)

    @torch.no_grad()
    def __getitem__(self, index: int) -> Tensor:
        return self.preprocessor(pseudo_collate([self.samples[index]]), False)['inputs'][0]


def adapt_backbone(model: nn.Module, teacher: nn.Module, samples: Sequence[dict], steps: int, batch_size: int,
                   work_dir: str | os.PathLike | None = None) -> AdaptReport:
    """Trains a converted backbone, in place, to reproduce its outputs with LayerNorm (:func:`mmunorm.adapt`).

    A third of the steps is block by block. `model` must have a :func:`backbone_of`; `teacher` is the backbone with
    LayerNorm, and `samples` are single images as of `FolderImages` or `samples_of`.
    """
    return adapt(backbone_of(model), teacher, _Inputs(samples, model.data_preprocessor), steps - steps // 3,
                 block_steps=steps // 3, batch_size=batch_size, lr=RATE, block_lr=RATE, work_dir=work_dir,
                 progress=True)
