"""Distillation of a converted model from its teacher with LayerNorm, without labels: block by block, then end to end.

Block by block, each part gets the teacher's input and learns the teacher's update, so that errors do not accumulate
over depth and training does not diverge. End to end, the outputs of the model are then trained to match the teacher's.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

from ..modules import eval_mode, is_any, tensors_in
from ..norms import OfflineNorm
from ..norms.base import check_count
from ..norms.layers import is_channels_first
from ..norms.replace import layer_norms
from ..utils import check_module, plural
from .agreement import Agreement, agreement, teacher_norms
from .calls import hooked, record_calls
from .images import batch_of, batches_of, floating, single_images
from .report import ConversionError
from .statistics import error_over_variance, token_sums, tokens_of

BLOCKS, WHOLE = 'block by block', 'end to end'
HELD_OUT = 256  # maximum number of held-out images if the caller names none
CHECKS, CHECK_EVERY = 20, 10  # maximum number of checks on held-out images in a phase, and minimum steps between them
CHECKED_IMAGES, CHECKED_BATCHES = 64, 4  # maximum number of images and of batches of a check
WARMUP = 60  # steps, at most a tenth of all
_VIT = 'timm.models.vision_transformer.VisionTransformer'  # samples tokens where it drops patches


@dataclass(frozen=True)
class AdaptReport:
    """The result of :func:`adapt` on held-out images; `str()` returns a text."""
    agreements: dict[str, Agreement]  # by phase: 'converted', 'block by block', 'end to end'; those that had steps
    history: tuple[dict, ...]  # the checks: phase, step, loss
    notes: tuple[str, ...]  # on skipped steps and undone phases

    @property
    def norms(self) -> dict[str, tuple[float, float]]:
        """By name, the error of a norm's output before and after."""
        reached = list(self.agreements.values())
        return {name: (error, reached[-1].norms[name]) for name, error in reached[0].norms.items()}

    def __str__(self) -> str:
        lines = [f'{phase}: {reached}' for phase, reached in self.agreements.items()]
        lines += [*self.notes, '', 'error of each norm, before and after:']
        return '\n'.join([*lines, *(f'  {name}  {old:.2%}  {new:.2%}' for name, (old, new) in self.norms.items())])


def mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrors each image `(N, C, H, W)` with a probability of 0.5."""
    flip = torch.rand(len(images), generator=generator).lt(0.5).to(images.device)
    return torch.where(flip[:, None, None, None], images.flip(-1), images)


def adapt(model: nn.Module, teacher: nn.Module, images, steps: int = 1000, *, block_steps: int | None = None,
          batch_size: int = 64, lr: float = 1e-4, block_lr: float = 2e-4, tokens: int | None = 64, held_out=None,
          augment: Callable[[Tensor, torch.Generator], Tensor] = mirrored, progress: bool = False) -> AdaptReport:
    """Trains a converted model in place to reproduce its teacher's outputs, without labels.

    First block by block, then end to end; each phase has its own AdamW, warm-up and cosine schedule. Norms use their
    running statistics, so that training optimizes the map that is folded; these are measured again at the end. A phase
    ends with the weights of the least loss on held-out images, or with those before it if the outputs agreed better
    then. Autocast uses bfloat16 if the device supports it. If it is interrupted, the model is as it was before.

    Args:
        model (nn.Module): a model converted by :func:`mmunorm.convert_norms`, in float32 or float64. Weights that do
            not require gradients are not trained.
        teacher (nn.Module): the model with LayerNorm that it was converted from, on the same device.
        images: a tensor `(N, C, H, W)`, batches, or a DataLoader, whose data set is read by index, or a data set of
            images. In a batch, images are itself, its first entry, or a tensor of a dict. After `augment` they are
            inputs of the models. Smaller images of a batch are padded with zeros.
        steps, block_steps (int): training steps end to end and block by block. Default to 1000 and `steps / 3`.
        batch_size (int): images per step, at most all. Defaults to 64.
        lr, block_lr (float): learning rates end to end and block by block. Default to 1e-4 and 2e-4.
        tokens (int): random patch tokens of each image in a step, besides the prefix tokens, in timm's
            `VisionTransformer`. None and other models: all tokens. Defaults to 64.
        held_out: floating-point images like `images`, not augmented. Defaults to the last eighth of `images`, at most
            256, which are then not trained on; if there is only one image, to this image.
        augment: a function of a batch on the model's device and a CPU generator. Defaults to :func:`mirrored`.
        progress (bool): print the loss at each check. Defaults to False.

    Raises:
        ConversionError: a ValueError, raised before the model is changed: the model has no converted norms or half
            precision, the teacher is of another architecture or shares weights, or there are no images or outputs on
            them are not finite.
    """
    block_steps = steps // 3 if block_steps is None else block_steps
    for name, value, minimum in (('steps', steps, 0), ('block_steps', block_steps, 0), ('batch_size', batch_size, 1)):
        check_count(name, value, minimum)
    phases = {BLOCKS: (block_steps, block_lr), WHOLE: (steps, lr)}
    _check_pair(model, teacher)
    images = single_images(images, 'images')
    if held_out is not None:
        held_out = single_images(held_out, 'held_out')
    else:
        first = len(images) - min(max(1, len(images) // 8), HELD_OUT)
        held_out = Subset(images, range(first, len(images)))
        images = Subset(images, range(max(1, first)))
    data = _Data(images, held_out, min(batch_size, len(images)), augment, next(teacher.parameters()).device)
    # Also where gradients are off.
    with torch.inference_mode(False), torch.enable_grad(), eval_mode(model, teacher):
        pair = _Pair(model, teacher, tokens if is_any(model, [_VIT]) else None, data.checked()[:1])
        return _train(pair, data, phases, progress)


def _train(pair: _Pair, data: _Data, phases: dict[str, tuple], progress: bool) -> AdaptReport:
    """Both phases. The model is unchanged after an exception."""
    weights = [weight for weight in pair.model.parameters() if weight.requires_grad]
    start, history, notes = _copies(weights), [], []
    measured = partial(agreement, pair.model, pair.teacher, data.held_out)
    try:
        reached = {'converted': measured()}
        if not math.isfinite(reached['converted'].score):
            raise ConversionError('held_out: the outputs of the models are not finite')
        for (phase, (steps, lr)), loss in zip(phases.items(), (pair.block_loss, pair.whole_loss), strict=True):
            if not steps:
                continue
            first, before = _copies(weights), list(reached.values())[-1]
            checks, skipped = fit(loss, steps, lr, weights, data, phase, progress)
            history += checks
            if skipped:
                notes.append(f'{phase}: {skipped} of {plural(steps, "step")} skipped, loss or gradient not finite')
            reached[phase] = measured()
            if not reached[phase].score >= before.score:
                notes.append(f'{phase} made the whole model worse, so its weights are those before: {reached[phase]}')
                _restore(weights, first)
                reached[phase] = before
        remeasure(pair.model, batches_of(data.held_out, data.batch_size, data.device, 'held_out'))
    except BaseException:
        _restore(weights, start)
        raise
    return AdaptReport(reached, tuple(history), tuple(notes))


def fit(loss: Callable[[Tensor, torch.Generator], Tensor], steps: int, lr: float, weights: Sequence[Tensor],
        data: _Data, phase: str, progress: bool) -> tuple[list[dict], int]:
    """Trains weights, which are then those of the least loss on held-out images.

    Returns the checks, and the number of steps that were skipped because their loss or gradient was not finite.
    """
    @torch.no_grad()
    def check() -> float:
        generator, images = torch.Generator().manual_seed(0), data.checked()
        return sum(loss(batch, generator).item() * len(batch) / len(images) for batch in images.split(data.batch_size))

    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.)
    best, least, history, skipped = _copies(weights), check(), [], 0
    for step in range(1, steps + 1):
        optimizer.param_groups[0]['lr'] = _rate(lr, step, steps)
        generator = torch.Generator().manual_seed(2 * step + (phase == WHOLE))
        value = loss(data.drawn(generator), generator)
        optimizer.zero_grad()
        if value.requires_grad:  # not of a model whose trained weights have no part in it
            value.backward()
            if nn.utils.clip_grad_norm_(weights, 1.).isfinite():
                optimizer.step()
            else:
                skipped += 1
        if step % max(CHECK_EVERY, steps // CHECKS) and step != steps:
            continue
        now = check()
        if now <= least:
            best, least = _copies(weights), now
        history.append(dict(phase=phase, step=step, loss=now))
        if progress:
            print(f'{phase}, step {step} of {steps}: loss {now:.4f}', flush=True)
    _restore(weights, best)
    optimizer.zero_grad()
    return history, skipped


@dataclass
class _Data:
    """Images to train on and to measure on."""
    images: Sequence
    held_out: Sequence
    batch_size: int
    augment: Callable[[Tensor, torch.Generator], Tensor]
    device: torch.device

    def drawn(self, generator: torch.Generator) -> Tensor:
        """A random batch, augmented."""
        chosen = torch.randperm(len(self.images), generator=generator)[:self.batch_size].tolist()
        images = self.augment(batch_of(self.images, chosen, self.device, 'images'), generator)
        return floating(images, 'images after augment')

    def checked(self) -> Tensor:
        """Some held-out images."""
        number = min(CHECKED_IMAGES, CHECKED_BATCHES * self.batch_size, len(self.held_out))
        chosen = torch.linspace(0, len(self.held_out) - 1, number).long().tolist()  # evenly spaced
        return floating(batch_of(self.held_out, chosen, self.device, 'held_out'), 'held_out')


class _Pair:
    """A model, its teacher and their losses on images like `image`."""

    def __init__(self, model: nn.Module, teacher: nn.Module, tokens: int | None, image: Tensor):
        self.model, self.teacher, self.tokens = model, teacher, tokens
        self.norms = layer_norms(teacher)
        self.parts = _parts(teacher, set(self.norms.values()))
        self.autocast = partial(torch.autocast, image.device.type, torch.bfloat16, enabled=(
            image.dtype == torch.float32 and _has_bfloat16(image.device)))

    @contextmanager
    def _wanted(self, images: Tensor, generator: torch.Generator) -> Iterator[tuple]:
        """A context for a loss; it has the teacher's output, and the calls of its parts."""
        with _sampled_tokens((self.model, self.teacher), self.tokens, generator), self.autocast():
            with torch.no_grad(), record_calls(self.teacher, self.parts) as wanted:
                output = self.teacher(images)
            yield output, wanted

    def block_loss(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """`log1p(|error|^2 / Var)` of each part's update on the teacher's input, averaged over images and parts."""
        with self._wanted(images, generator) as (_, wanted):
            return _mean(_relative_error(*(_update(output, args, name in self.norms) for output in (
                self.model.get_submodule(name)(*args, **kwargs), target))) for name, args, kwargs, target in wanted)

    def whole_loss(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The same of the outputs of the model and of its last norm, their 1 - cosine of each token, and the same of
        each part's output after a LayerNorm without parameters."""
        with self._wanted(images, generator) as (output, wanted), record_calls(self.model, self.parts) as got:
            pairs = list(zip(tensors_in(self.model(images)), tensors_in(output), strict=True))
        pairs = [[_tokens(x, 1 if x.dim() == 4 else -1) for x in pair] for pair in pairs if pair[0].dim()]
        streams = [[_tokens(next(tensors_in(out)), self.parts[name]) for name, _, _, out in calls]
                   for calls in zip(got, wanted, strict=True)]
        pairs.append(streams[-1])
        return (_mean(_relative_error(*pair) for pair in pairs)
                + _mean(1 - F.cosine_similarity(*pair, dim=-1) for pair in pairs)
                + _mean(_relative_error(*(F.layer_norm(x, x.shape[-1:]) for x in pair)) for pair in streams))


@torch.no_grad()
def remeasure(model: nn.Module, inputs: Iterable[Tensor]) -> None:
    """Updates the statistics of offline norms to their current inputs, without changing their affine maps."""
    sums: dict[OfflineNorm, Tensor] = {}

    def add(norm: OfflineNorm, args: tuple, kwargs: dict, output: Tensor) -> None:
        sums[norm] = sums.get(norm, 0) + token_sums(tokens_of(norm, args, kwargs), norm.eps)

    with hooked((norm for norm in model.modules() if isinstance(norm, OfflineNorm) and not norm.fold_obstacle), add):
        for x in inputs:
            model(x)
    for norm, total in sums.items():
        norm.set_affine(*norm.affine(), *(total[1:3] / total[0]))  # of E[x] and E[x^2]


def _check_pair(model: nn.Module, teacher: nn.Module) -> None:
    """Raises a ConversionError unless the model is a conversion of the teacher and can be trained."""
    check_module(model)
    check_module(teacher, 'teacher')
    norms = tuple(f'{name}.' for name in teacher_norms(teacher))
    for role, module in dict(model=model, teacher=teacher).items():
        for name, weight in module.named_parameters():
            if weight.dtype in (torch.float16, torch.bfloat16):
                raise ConversionError(f'{role}: {name} is {weight.dtype}; train in float32, bfloat16 is used inside')
    shapes, wanted = ({name: weight.shape for name, weight in module.named_parameters() if not name.startswith(norms)}
                      for module in (model, teacher))
    if shapes != wanted:
        raise ConversionError('teacher: has another architecture, with parameters of other names or shapes')
    if not any(isinstance(part, OfflineNorm) for name in norms for part in model.get_submodule(name[:-1]).modules()):
        raise ConversionError(f'model: {type(model).__name__} has no norms to adapt; call convert_norms first')
    trained = {weight.data_ptr(): name for name, weight in model.named_parameters()
               if weight.requires_grad and weight.numel()}
    if shared := [trained[weight.data_ptr()] for weight in teacher.parameters() if weight.data_ptr() in trained]:
        raise ConversionError(f'teacher: shares {shared[0]} with the model; take a copy.deepcopy')


def _parts(model: nn.Module, norms: set[nn.Module]) -> dict[str, int]:
    """Names of the parts that learn by themselves, and the dimension of the channels of their outputs.

    A part is the outermost module with norms that holds no list of further such modules, such as a block, a patch
    merging or a patch embedding; and each norm outside of these.
    """
    parts: dict[str, int] = {}
    for name, module in model.named_modules():
        lists = [inner for inner in module.modules() if isinstance(inner, (nn.Sequential, nn.ModuleList))]
        listed = {child for modules in lists for child in modules if not norms.isdisjoint(child.modules())}
        inner_norms = norms.intersection(module.modules())
        is_part = name and listed <= norms and module not in lists
        if inner_norms and (module in norms or is_part) and not any(name.startswith(f'{part}.') for part in parts):
            parts[name] = 1 if any(map(is_channels_first, inner_norms)) else -1
    return parts


@contextmanager
def _sampled_tokens(models: Sequence[nn.Module], tokens: int | None, generator: torch.Generator) -> Iterator[None]:
    """A context in which both models use the prefix tokens and the same random patch tokens of each image."""
    chosen = []

    def sample(module: nn.Module, args: tuple, kwargs: dict, x: Tensor) -> Tensor:
        prefix = models[0].num_prefix_tokens
        if not chosen:
            order = torch.rand(len(x), x.shape[1] - prefix, generator=generator).argsort(1)[:, :tokens] + prefix
            chosen.append(torch.cat([torch.arange(prefix).expand(len(x), -1), order], 1).to(x.device))
        return x.gather(1, chosen[0][..., None].expand(-1, -1, x.shape[-1]))

    # After the positional embedding.
    with hooked([] if tokens is None else [model.patch_drop for model in models], sample):
        yield


def _update(output, args: tuple, is_norm: bool) -> Tensor:
    """The output of a part minus its input; for a norm, or a part that changes the shape, the output."""
    output = next(tensors_in(output)).float()
    is_residual = not is_norm and args and isinstance(args[0], Tensor) and args[0].shape == output.shape
    return output - args[0].float() if is_residual else output


def _relative_error(x: Tensor, wanted: Tensor) -> Tensor:
    """`log1p(squared error / variance of wanted)` of each image, `(N,)`; of the batch if images have one value each."""
    number = len(wanted) if wanted.numel() > len(wanted) else 1
    return error_over_variance(x.reshape(number, -1), wanted.reshape(number, -1)).log1p()


def _tokens(x: Tensor, axis: int) -> Tensor:
    return x.float().movedim(axis, -1)


def _mean(losses: Iterator[Tensor]) -> Tensor:
    return torch.stack([loss.mean() for loss in losses]).mean()


def _copies(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def _restore(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _rate(lr: float, step: int, steps: int) -> float:
    warmup = min(WARMUP, steps // 10 + 1)
    return lr * min(1., step / warmup) * 0.5 * (1 + math.cos(math.pi * step / (steps + 1)))


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported()
    capabilities = getattr(torch.cpu, 'get_capabilities', dict)()  # unknown before torch 2.11: float32
    return device.type == 'cpu' and any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))
