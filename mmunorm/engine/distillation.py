"""Distillation from the LayerNorm model that a run starts from."""
from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmpretrain.models.classifiers import BaseClassifier
from torch import Tensor, nn

from ..checkpoints.loading import load_weights
from ..config.models import build_model
from ..config.presets import layer_norm_config
from ..conversion.statistics import error_over_variance
from ..modules import map_tensors
from ..utils import PreflightError
from .conversion import backbone_of
from .runner import unwrapped_model


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
        inputs = kwargs['inputs'] if 'inputs' in kwargs else args[0]
        with torch.no_grad():
            wanted = self._teacher(inputs) if self._is_classifier else self._teacher.backbone(inputs)
        distance = (logit_distance(output, wanted, self.temperature) if self._is_classifier else
                    feature_distance(output, wanted))
        weighted = {name: map_tensors(lambda loss: loss * (1 - self.weight), value) if 'loss' in name else value
                    for name, value in losses.items()}
        return {**weighted, 'loss_distillation': self.weight * distance}


def logit_distance(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """`T^2 * KL(softmax(teacher / T), softmax(student / T))`, mean over samples, `()`; logits are `(N, classes)`."""
    logs = F.log_softmax(student.float() / temperature, dim=-1)
    wanted = F.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(logs, wanted, reduction='batchmean', log_target=True)


def feature_distance(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """The squared error over the teacher's variance, mean over the feature maps, `()`."""
    pairs = ((a.float().flatten(), b.float().flatten()) for a, b in zip(student, teacher, strict=True))
    return torch.stack([error_over_variance(*pair) for pair in pairs]).mean()
