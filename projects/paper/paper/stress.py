"""A disturbance of training inputs that is the same for every norm."""
from __future__ import annotations

import math

import numpy as np
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor

from mmunorm.engine.runner import unwrapped_model
from mmunorm.utils import PreflightError


@HOOKS.register_module()
class InputStressHook(Hook):
    """Scales a small share of the training batches by a large factor, for heavy-tailed activations.

    With `probability`, all normalized inputs of a step are multiplied by one log-uniform factor. It depends only on
    `seed` and the step, so all runs with one seed, also resumed ones, have the same disturbed steps. Validation and
    testing are not disturbed. LayerNorm is hardly affected: after the patch embedding it divides by the factor. A norm
    with averaged or running statistics gets outliers.

    The model's data preprocessor must return `inputs` as one batch of normalized images, a tensor, as in detectors
    and classifiers; not token ids, or images with values in [0, 1].

    Args:
        probability (float): share of the steps, in [0, 1]. Defaults to 0.02.
        scale (tuple[float, float]): smallest and largest factor, 0 < smallest <= largest. Defaults to (2, 30).
        seed (int): random seed, at least 0. Defaults to 0.

    Raises:
        PreflightError: in the first step, if the model's inputs are something else.
    """

    def __init__(self, probability: float = 0.02, scale: tuple[float, float] = (2.0, 30.0), seed: int = 0):
        if not 0 <= probability <= 1:
            raise ValueError(f'probability must be in [0, 1], got {probability!r}')
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] < math.inf:
            raise ValueError(f'scale must be (least, greatest) with 0 < least <= greatest, both finite, got {scale!r}')
        if seed < 0:
            raise ValueError(f'seed must not be negative, got {seed!r}')
        self.probability = probability
        self.scale = tuple(scale)
        self.seed = seed
        self._factor = 1.0

    def factor(self, step: int) -> float:
        """The factor for the inputs of a step; steps are counted from 0. An undisturbed step has factor 1."""
        rng = np.random.default_rng([self.seed, step])
        if rng.random() >= self.probability:
            return 1.0
        return math.exp(rng.uniform(*map(math.log, self.scale)))

    def before_train(self, runner) -> None:
        self._handle = unwrapped_model(runner).data_preprocessor.register_forward_hook(self._disturb)

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        self._factor = self.factor(runner.iter)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        self._factor = 1.0

    def after_train(self, runner) -> None:
        self._handle.remove()

    def _disturb(self, module, args, output: dict) -> dict:
        inputs = output.get('inputs')
        if not isinstance(inputs, Tensor):
            raise PreflightError('InputStressHook multiplies a batch of normalized images, and the inputs that '
                                 f'{type(module).__name__} returns are of type {type(inputs).__name__}: leave the '
                                 'hook out.')
        if self._factor == 1.0:
            return output
        return {**output, 'inputs': output['inputs'] * self._factor}
