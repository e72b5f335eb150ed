"""Agreement of a converted model with its teacher with LayerNorm, on images."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..modules import eval_mode, tensors_in
from ..norms.layers import is_channels_first
from ..norms.replace import layer_norms
from .calls import record_calls
from .images import batches_of, single_images
from .report import ConversionError
from .statistics import EPS


@dataclass(frozen=True)
class Agreement:
    """Correlations of a model's outputs with its teacher's, and errors of its norms; see :func:`agreement`."""
    tokens: float  # over all tokens of all images
    pooled: float | None  # of one vector per image, such as the class token, minus its mean; None: one image
    norms: dict[str, float]  # by name, `E|y - y_teacher|^2 / Var(y_teacher)` of a norm's output

    @property
    def score(self) -> float:
        """`tokens + pooled`, by which two states of a model are compared."""
        return self.tokens + (self.pooled or 0.)

    def __str__(self) -> str:
        pooled = '-' if self.pooled is None else f'{self.pooled:.3f}'
        return f'all tokens {self.tokens:.3f}, centred class token {pooled}'


@torch.no_grad()
def agreement(model: nn.Module, teacher: nn.Module, images, batch_size: int = 16) -> Agreement:
    """Compares a model with its teacher, in the precision of the models.

    "All tokens" are those of the model's output if that is one tensor of more than two dimensions, such as an image,
    else those of the last LayerNorm's output. "Pooled" is the model's output if that is one vector per image, `(N, C)`,
    such as the class token or logits, else the mean of all tokens.

    Args:
        model, teacher (nn.Module): models of the same architecture.
        images: floating-point images, as for :func:`mmunorm.adapt`.
        batch_size (int): images per forward pass; the outputs of all norms are kept in memory.
    """
    images = single_images(images, 'images')
    device = next(model.parameters()).device
    names = teacher_norms(teacher)
    errors = defaultdict(lambda: torch.zeros(2, device=device))
    sums, vectors = 0, ([], [])  # of tokens; one vector per image, of the model and of the teacher
    for batch in batches_of(images, batch_size, device, 'images'):
        with eval_mode(teacher), record_calls(teacher, names) as teacher_calls:
            target = teacher(batch)
        with eval_mode(model), record_calls(model, names) as calls:
            output = model(batch)
        for (name, *_, y), (*_, t) in zip(calls, teacher_calls, strict=True):
            errors[name] += torch.stack([(y - t).square().sum(), (t - t.mean()).square().sum()])
        axis = 1 if is_channels_first(names[calls[-1][0]]) else -1
        compared = []
        results = (calls[-1][-1], output), (teacher_calls[-1][-1], target)
        for rows, (last_norm, result) in zip(vectors, results, strict=True):
            dims = result.dim() if isinstance(result, Tensor) else 0
            if dims > 2:
                tokens = result.movedim(1 if dims == 4 else -1, -1)
            else:
                tokens = next(tensors_in(last_norm)).movedim(axis, -1)
            mean = tokens.reshape(len(tokens), -1, tokens.shape[-1]).mean(1)
            rows.append((result if dims == 2 else mean).double())
            compared.append(tokens.flatten().double())
        x, y = compared
        sums += torch.stack([torch.full_like(x[0], len(x)), x.sum(), y.sum(), x @ x, y @ y, x @ y])
    x, y = (torch.cat(rows) - torch.cat(rows).mean(0) for rows in vectors)
    pooled = ((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt().clamp(min=EPS)).item()
    return Agreement(
        tokens=_correlation(sums).item(), pooled=pooled if len(x) > 1 else None,
        norms={name: (error / size.clamp(min=EPS)).item() for name, (error, size) in errors.items()})


def _correlation(sums: Tensor) -> Tensor:
    """The correlation, given sums n, x, y, x^2, y^2 and x y."""
    n, x, y, x2, y2, xy = sums
    variances = [n * squares - total.square() for total, squares in ((x, x2), (y, y2))]
    # That of a constant, such as a black image, is 0 and not a quotient of rounding errors.
    varies = (variances[0] > EPS * n * x2) & (variances[1] > EPS * n * y2)
    return (n * xy - x * y) / (variances[0] * variances[1]).sqrt().where(varies, torch.inf)


def teacher_norms(teacher: nn.Module) -> dict[str, nn.Module]:
    names = layer_norms(teacher)
    if not names:
        raise ConversionError(f'teacher: {type(teacher).__name__} has no LayerNorm; copy the model before '
                              'convert_norms')
    return names
