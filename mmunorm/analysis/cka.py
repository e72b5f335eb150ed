"""Linear CKA between the layers of two models (Fig. 6), without the bias of small batches.

Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019, with the minibatch
estimate of Nguyen et al., ICLR 2021, of the unbiased HSIC of Song et al., JMLR 2012 (Eq. 5).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ..norms.layers import norm_layers

# How many features per example are in float64 at a time.
_CHUNK = 2**16
_BRANCHES = ('attn', 'ffn', 'mlp')


def gram(features: Tensor) -> Tensor:
    """Inner products between the examples of a batch, `(n, n)` float64.

    Args:
        features: `(n, ...)`; all but the first dimension are features. Each feature's mean over the
            batch is subtracted. This does not change CKA, but keeps digits.
    """
    features = features.flatten(1)
    total = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
    for chunk in features.split(_CHUNK, dim=1):
        chunk = chunk.double()
        chunk = chunk - chunk.mean(dim=0)
        total += chunk @ chunk.T
    return total


def centre(grams: Tensor) -> Tensor:
    """U-centres Gram matrices. The inner product of two, divided by n (n - 3), is their unbiased HSIC.

    Args:
        grams: `(layers, n, n)`, symmetric.

    Returns:
        The same shape, with zeros on the diagonals and rows that sum to zero.

    Raises:
        ValueError: n is less than 4, for which there is no unbiased estimate.
    """
    n = grams.shape[-1]
    if n < 4:
        raise ValueError(f'grams: the unbiased HSIC needs batches of at least 4 examples, got {n}')
    off_diagonal = 1 - torch.eye(n, dtype=grams.dtype, device=grams.device)
    grams = grams * off_diagonal
    rows = grams.sum(dim=-1, keepdim=True) / (n - 2)
    total = grams.sum(dim=(-2, -1), keepdim=True) / ((n - 1) * (n - 2))
    return (grams - rows - rows.transpose(-2, -1) + total) * off_diagonal


class MinibatchCKA:
    """Linear CKA between all layers of two models, from one batch after another.

    Between batches, only `layers_a x layers_b` numbers are kept. Within a batch, each layer has one `(n, n)` matrix.
    """

    def __init__(self):
        self._cross = self._self_a = self._self_b = 0.

    def update(self, grams_a: Tensor, grams_b: Tensor) -> None:
        """Adds a batch: Gram matrices `(layers, n, n)` of the same n examples in both models."""
        if grams_a.shape[1:] != grams_b.shape[1:]:
            raise ValueError('grams_a and grams_b must be of the same batch, got '
                             f'{tuple(grams_a.shape[1:])} and {tuple(grams_b.shape[1:])}')
        n = grams_a.shape[-1]
        a, b = (centre(grams).flatten(1) / (n * (n - 3)) ** 0.5 for grams in (grams_a, grams_b))
        self._cross = self._cross + (a @ b.T).cpu().numpy()
        self._self_a = self._self_a + a.square().sum(dim=1).cpu().numpy()
        self._self_b = self._self_b + b.square().sum(dim=1).cpu().numpy()

    def compute(self) -> np.ndarray:
        """CKA `(layers_a, layers_b)`; at most 1, and about 0 (or slightly below) for unrelated layers."""
        with np.errstate(invalid='ignore', divide='ignore'):
            return self._cross / np.sqrt(np.outer(self._self_a, self._self_b))


def branch_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Norms, attentions and feed-forward networks by name, in the order of the model (Fig. 6).

    The latter two are the modules called `attn`, `ffn` or `mlp`, as OpenMMLab and timm name them.
    """
    norms = dict(norm_layers(model))
    found = {}
    for name, module in model.named_modules():
        parts = name.split('.')
        nested = any(part in _BRANCHES for part in parts[:-1])
        if name in norms or (parts[-1] in _BRANCHES and not nested):
            found[name] = module
    return found


class GramRecorder:
    """Gram matrices of the outputs of a model's layers, one forward pass at a time.

    Each output becomes an `(n, n)` matrix at once, so no activation is kept. If a layer runs several times in a
    pass, all its outputs are features. An output that is not a tensor `(n, ...)` for n pictures is left out.

    Args:
        layers: the layers, by name.
    """

    def __init__(self, layers: dict[str, nn.Module]):
        self._grams: dict[str, Tensor] = {}
        self._examples = 0
        self._handles = [module.register_forward_hook(self._hook(name)) for name, module in layers.items()]

    def __call__(self, forward: Callable[[], object], examples: int) -> dict[str, Tensor]:
        """Runs `forward` on a batch of `examples`; returns `(n, n)` matrices, in the order in which layers run."""
        self._grams, self._examples = {}, examples
        with torch.no_grad():
            forward()
        return self._grams

    def remove(self) -> None:
        """Takes the hooks from the layers."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str):
        def hook(module, args, output) -> None:
            if isinstance(output, (tuple, list)) and output:
                output = output[0]
            if not isinstance(output, Tensor) or output.dim() < 2 or len(output) != self._examples:
                return
            matrix = gram(output.detach())
            self._grams[name] = self._grams[name] + matrix if name in self._grams else matrix

        return hook


def compare_models(batches: Iterable[tuple[object, int]], run_a: Callable, run_b: Callable,
                   layers_a: dict[str, nn.Module],
                   layers_b: dict[str, nn.Module]) -> tuple[np.ndarray, list[str], list[str]]:
    """Linear CKA between the layers of two models on the same pictures.

    Args:
        batches: pairs of a batch and its number of examples; batches of fewer than 4 are left out.
        run_a, run_b: functions that run the models on a batch.
        layers_a, layers_b: the layers to compare, by name.

    Returns:
        CKA `(layers_a, layers_b)` and the names of the layers, in the order in which they run.

    Raises:
        ValueError: no batch has 4 examples, or a model has no layer with an output for each example.
    """
    recorders = [GramRecorder(layers_a), GramRecorder(layers_b)]
    measure, names = MinibatchCKA(), None
    try:
        for batch, examples in batches:
            if examples < 4:
                continue
            grams = [recorder(partial(run, batch), examples)
                     for recorder, run in zip(recorders, (run_a, run_b), strict=True)]
            names = names or [list(found) for found in grams]
            if not all(names):
                raise ValueError('a model has no norm, attention or feed-forward layer with an output '
                                 'for each picture')
            measure.update(*(torch.stack([found[name] for name in order])
                             for found, order in zip(grams, names, strict=True)))
    finally:
        for recorder in recorders:
            recorder.remove()
    if names is None:
        raise ValueError('the unbiased estimate needs batches of at least 4 pictures')
    return measure.compute(), *names
