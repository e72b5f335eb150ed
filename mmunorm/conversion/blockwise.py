"""Trains a converted model, without labels, to give what its teacher with LayerNorm gives: block by block, then whole.

Block by block, each part gets the teacher's input and learns the teacher's update, so that errors do not add up over
depth and nothing diverges. End to end, the outputs of the whole model then approach the teacher's.
"""
from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ..norms import OfflineNorm
from ..norms.layers import is_channels_first
from ..norms.replace import layer_norms
from .adapt import measure_again, put_back
from .convert import ConversionError, watched
from .replay import _tensors

CHECKS = 20  # of the loss on held-out images, a phase
RISEN = 1.5  # from this share of the least loss on, training goes back to the best weights,
SLOWER = 0.3  # at this share of the rate
WARMUP = 60  # steps, at most a tenth
CHECKED_IMAGES = 64  # held-out images of a check
TINY = 1e-12
_VIT = 'timm.models.vision_transformer.VisionTransformer'  # samples tokens where it drops patches


@dataclass(frozen=True)
class Agreement:
    """Correlations of a model's outputs with its teacher's, by :func:`agreement`."""
    tokens: float  # over all tokens of all images
    pooled: float | None  # of one vector an image, less its mean over images: the class token; None: one image
    percentile_10: float  # of the images' own correlations over all tokens
    worst: float
    worst_images: tuple[int, ...]  # up to five, the worst first

    def __str__(self) -> str:
        pooled = '-' if self.pooled is None else f'{self.pooled:.3f}'
        return (f'all tokens {self.tokens:.3f}, centred class token {pooled}, 10th percentile of images '
                f'{self.percentile_10:.3f}, worst {self.worst:.3f}')


@dataclass(frozen=True)
class AdaptReport:
    """What :func:`adapt` reached on held-out images; `str()` gives a text.

    Attributes:
        agreements: by phase: 'converted', 'block by block', 'end to end'; a phase without steps is left out.
        norms: by name, the error of a norm's output, `E|y - y_teacher|^2 / Var(y_teacher)`, before and after.
        history: the checks: phase, step, loss on held-out images, rate, tokens (the correlation over all of them).
        notes: what was done otherwise than asked for, such as all tokens where windows forbid sampling.
    """
    agreements: dict[str, Agreement]
    norms: dict[str, tuple[float, float]]
    history: tuple[dict, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f'{phase}: {reached}' for phase, reached in self.agreements.items()]
        worst = ', '.join(map(str, list(self.agreements.values())[-1].worst_images))
        lines += [f'worst held-out images: {worst}', *self.notes, '', 'error of each norm, before and after:']
        return '\n'.join(lines + [f'  {name}  {old:.2%}  {new:.2%}' for name, (old, new) in self.norms.items()])

    def as_dict(self) -> dict:
        """Plain data for a JSON file."""
        return asdict(self)


def mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the images `(N, C, H, W)`, mirrored."""
    flip = torch.rand(len(images), generator=generator).lt(0.5).to(images.device)
    return torch.where(flip[:, None, None, None], images.flip(-1), images)


def adapt(model: nn.Module, teacher: nn.Module, images: Sequence[Tensor], steps: int = 1000, *,
          block_steps: int | None = None, batch_size: int = 64, lr: float = 1e-4, block_lr: float = 2e-4,
          tokens: int | None = 64, held_out: Sequence[Tensor] | None = None,
          augment: Callable[[Tensor, torch.Generator], Tensor] = mirrored, work_dir: str | os.PathLike | None = None,
          progress: bool = False) -> AdaptReport:
    """Trains a converted model to give its teacher's outputs, in place; labels are not needed.

    First `block_steps` steps block by block: every part that has norms gets the teacher's input and learns the
    teacher's update, the output minus the input where shapes agree; all parts in one step. The loss is
    `log1p(|error|^2 / Var)` of each image, mean over images and parts. Then `steps` steps end to end: this loss of the
    outputs (the model's and those of the last norm), 1 - cosine of each of their tokens, and this loss of each part's
    output after a LayerNorm without parameters. Norms are as in inference, so that the map that is learned is the one
    that folds. AdamW with betas of 0.9 and 0.98, no weight decay, norm of gradients up to 1; each phase has an
    optimizer, a warm-up and a cosine of its own. bfloat16 where a CUDA device or a CPU has it.

    A step whose loss or gradient is not finite is skipped. 20 times a phase the loss is measured on held-out images;
    where it has risen by half or is not finite, training goes back to the best weights at 0.3 of the rate. The model
    ends with the best weights, also after an exception.

    Args:
        model (nn.Module): converted by :func:`mmunorm.convert_norms`, of float32 or float64. Weights that do not
            require gradients stay.
        teacher (nn.Module): the model that it was converted from, with LayerNorm, on the same device.
        images (Sequence): tensors `(C, H, W)` as the models take them after `augment`, one or thousands: a tensor
            `(N, C, H, W)`, a list, or a data set, of whose tuples the first entry counts.
        steps (int): of training end to end. Defaults to 1000.
        block_steps (int): block by block. Defaults to a third of `steps`.
        batch_size (int): images a step, at most all. Defaults to 64.
        lr, block_lr (float): rates of the two phases. Default to 1e-4 and 2e-4.
        tokens (int): in timm's `VisionTransformer`, a step sees so many random patch tokens of each image, with the
            class token and other prefix tokens. None, and other models: all tokens. Defaults to 64.
        held_out (Sequence): images as `images`, not augmented, floating. Defaults to an eighth of `images`, which is
            then not trained on; of a single image, the image itself.
        augment: of a batch `(N, C, H, W)` on the model's device and a CPU generator. Defaults to :func:`mirrored`.
        work_dir (str): a folder. Each check writes `adapt.pt` to it, whose `state_dict` has the best weights so far;
            the same call goes on from there after a kill. None: nothing is written.
        progress (bool): show a progress bar with the correlation on held-out images. Defaults to False.

    Returns:
        AdaptReport: what each phase gave, on the held-out images.

    Raises:
        ConversionError: a ValueError, before the model changes: no converted norms, a teacher of another architecture
            or without LayerNorm, half precision, images that are none or that the model does not take, no steps, or a
            `work_dir` with the state of another adaptation.
    """
    block_steps = steps // 3 if block_steps is None else block_steps
    if min(steps, block_steps) < 0 or not steps + block_steps:
        raise ConversionError(f'steps={steps}, block_steps={block_steps}: at least one step is needed')
    if batch_size < 1 or tokens is not None and tokens < 1:
        raise ConversionError(f'batch_size={batch_size}, tokens={tokens}: each must be at least 1')
    norms = _converted_norms(model, teacher)
    notes = []
    if not len(images):
        raise ConversionError('images: there is none')
    number = len(images)
    if held_out is None:
        held_out = [images[i] for i in range(number - max(1, number // 8), number)]
        number = max(1, number - len(held_out))
        if len(images) == 1:
            notes.append('the one image is trained on and measured on')
    if not len(held_out):
        raise ConversionError('held_out: there is none')
    if tokens is not None and not _samples_tokens(model):
        tokens = None
        notes.append(f'all tokens in each step: {type(model).__name__} has windows, or does not tell how to drop some')
    modes = {module: module.training for each in (model, teacher) for module in each.modules()}
    model.eval(), teacher.eval()
    try:
        run = _Run(model, teacher, norms, images, number, held_out, augment, batch_size, tokens, progress)
        settings = dict(steps=steps, block_steps=block_steps, batch_size=batch_size, lr=lr, block_lr=block_lr,
                        tokens=tokens, images=number)
        run.open(None if work_dir is None else Path(work_dir), settings)
        if not run.reached:
            run.reached['converted'] = agreement(model, teacher, held_out, batch_size)
            run.errors = run.norm_errors()
        for phase, count, rate in (('block by block', block_steps, block_lr), ('end to end', steps, lr)):
            if count and phase not in run.reached:
                run.train(phase, count, rate)
                run.reached[phase] = agreement(model, teacher, held_out, batch_size)
        after = run.norm_errors()
        measure_again(model, (run.checked[i:i + batch_size] for i in range(0, len(run.checked), batch_size)))
    finally:
        for module, mode in modes.items():
            module.training = mode
    return AdaptReport(run.reached, {name: (error, after[name]) for name, error in run.errors.items()},
                       tuple(run.history), tuple(notes))


class _Run:
    """One adaptation, and its state between checks."""

    def __init__(self, model, teacher, norms, images, number, held_out, augment, batch_size, tokens, progress):
        self.model, self.teacher, self.norms = model, teacher, norms
        self.parts = _parts(teacher, {teacher.get_submodule(name) for name in layer_norms(teacher)})
        self.images, self.number, self.augment = images, number, augment
        self.batch_size, self.tokens, self.progress = min(batch_size, number), tokens, progress
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.device = next(iter(self.weights.values())).device
        some = torch.linspace(0, len(held_out) - 1, min(CHECKED_IMAGES, len(held_out))).long()
        self.checked = _batch(held_out, some, self.device, 'held_out')
        try:
            with torch.no_grad():
                outputs = _tensors(teacher(self.checked[:1]))
        except Exception as error:
            raise ConversionError(f'images: {type(teacher).__name__} does not take {tuple(self.checked[:1].shape)}: '
                                  f'{str(error).splitlines()[0] if str(error) else type(error).__name__}') from error
        if not outputs or not all(output.isfinite().all() for output in outputs):
            raise ConversionError("teacher: its output on the first held-out image is not finite, or no tensor")
        self.path, self.settings, self.saved = None, {}, None
        self.reached: dict[str, Agreement] = {}
        self.errors: dict[str, float] = {}
        self.history: list[dict] = []

    def open(self, folder: Path | None, settings: dict) -> None:
        """Goes on from what an earlier, killed run has written to a folder."""
        if folder is None:
            return
        self.path, self.settings = folder / 'adapt.pt', settings
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.is_file():
            return
        saved = torch.load(self.path, map_location=self.device, weights_only=True)
        if saved['settings'] != settings or saved['state_dict'].keys() != self.model.state_dict().keys():
            raise ConversionError(f'work_dir={str(folder)!r}: adapt.pt is of another adaptation; name another folder')
        self.model.load_state_dict(saved['state_dict'])
        self.reached = {phase: Agreement(**values) for phase, values in saved['reached'].items()}
        self.errors, self.history, self.saved = saved['errors'], saved['history'], saved

    def train(self, phase: str, steps: int, lr: float) -> None:
        """One phase; the model ends with its best weights, which are never worse than those at its beginning."""
        weights = list(self.weights.values())
        state = dict(phase=phase, step=0, begun=0, rate=lr, least=self.loss_on_checked(phase),
                     best=[weight.detach().clone() for weight in weights])
        optimizer = _optimizer(weights)
        if self.saved and self.saved['phase'] == phase:
            state = {key: self.saved[key] for key in state}
            put_back(weights, self.saved['now'])
            optimizer.load_state_dict(self.saved['optimizer'])
        every = max(1, steps // CHECKS)
        try:
            with tqdm(total=steps, initial=state['step'], desc=phase, unit='step',
                      disable=None if self.progress else True) as bar:
                for step in range(state['step'] + 1, steps + 1):
                    for group in optimizer.param_groups:
                        group['lr'] = _rate(state['rate'], step - state['begun'], steps - state['begun'])
                    self.step(phase, step, optimizer, weights)
                    bar.update()
                    if step % every and step != steps:
                        continue
                    now, state['step'] = self.loss_on_checked(phase), step
                    if now <= state['least']:
                        state.update(least=now, best=[weight.detach().clone() for weight in weights])
                    elif not now < RISEN * state['least']:  # nan, too
                        put_back(weights, state['best'])
                        state.update(rate=state['rate'] * SLOWER, begun=step)
                        optimizer = _optimizer(weights)
                    tokens = agreement(self.model, self.teacher, self.checked, self.batch_size).tokens
                    self.history.append(dict(phase=phase, step=step, loss=now, rate=state['rate'], tokens=tokens))
                    bar.set_postfix_str(f'correlation {tokens:.3f}, loss {now:.4f}')
                    self.save(state, optimizer)
        finally:
            put_back(weights, state['best'])
            for weight in weights:
                weight.grad = None

    def step(self, phase: str, step: int, optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> None:
        # Seeded by the step, so that a run that goes on sees what it would have seen.
        generator = torch.Generator().manual_seed(2 * step + (phase == 'end to end'))
        chosen = torch.randperm(self.number, generator=generator)[:self.batch_size]
        images = self.augment(_batch(self.images, chosen, self.device, 'images', floating=False), generator)
        loss = self.loss(phase, _floating(images, 'augment'), generator)
        optimizer.zero_grad()
        if not (loss.isfinite() and loss.requires_grad):
            return
        loss.backward()
        if nn.utils.clip_grad_norm_(weights, 1.).isfinite():
            optimizer.step()

    @torch.no_grad()
    def loss_on_checked(self, phase: str) -> float:
        generator, total = torch.Generator().manual_seed(0), 0.
        for images in self.checked.split(self.batch_size):
            total += self.loss(phase, images, generator).item() * len(images)
        return total / len(self.checked)

    def loss(self, phase: str, images: Tensor, generator: torch.Generator) -> Tensor:
        with _sampled_tokens((self.model, self.teacher), self.tokens, generator), _autocast(images):
            with torch.no_grad(), _calls(self.teacher, self.parts) as wanted:
                output = self.teacher(images)
            if phase == 'block by block':
                # Taken when the part returned: inputs and outputs may be changed in place afterwards.
                updates = [(_update(name, _first(self.model.get_submodule(name)(*args, **kwargs)), args, self.norms),
                            _update(name, _first(out), args, self.norms)) for name, args, kwargs, out in wanted]
                return _mean([_relative_error(*pair).log1p().mean() for pair in updates])
            with _calls(self.model, self.parts, copied=False) as got:
                outputs = list(zip(_tensors(self.model(images)), _tensors(output), strict=True))
        axes = [1 if student.dim() == 4 else -1 for student, _ in outputs]
        streams = [(_first(mine[-1]), _first(theirs[-1]), self.parts[theirs[0]])
                   for mine, theirs in zip(got, wanted, strict=True)]
        outputs.append(streams[-1][:2])
        axes.append(streams[-1][-1])
        losses = [_mean([_relative_error(*pair).log1p().mean() for pair in outputs]),
                  _mean([1 - F.cosine_similarity(a.float(), b.float(), dim=axis).mean()
                         for (a, b), axis in zip(outputs, axes, strict=True)]),
                  _mean([_relative_error(*(_plain_norm(x, axis) for x in pair)).log1p().mean()
                         for *pair, axis in streams])]
        return torch.stack(losses).sum()

    @torch.no_grad()
    def norm_errors(self) -> dict[str, float]:
        """By norm: the squared error of its output over the variance of the teacher's."""
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, device=self.device))
        for images in self.checked.split(8):
            with _calls(self.teacher, self.norms) as wanted:
                self.teacher(images)
            with _calls(self.model, self.norms) as got:
                self.model(images)
            for (name, _, _, y), (_, _, _, t) in zip(got, wanted, strict=True):
                sums[name] += torch.stack([(y - t).square().sum(), (t - t.mean()).square().sum()])
        return {name: (error / size.clamp(min=TINY)).item() for name, (error, size) in sums.items()}

    def save(self, state: dict, optimizer: torch.optim.Optimizer) -> None:
        if self.path is None:
            return
        best = dict(zip(self.weights, state['best'], strict=True))
        reached = {phase: asdict(values) for phase, values in self.reached.items()}
        torch.save(dict(state, state_dict={**self.model.state_dict(), **best}, settings=self.settings,
                        now=[weight.detach() for weight in self.weights.values()], optimizer=optimizer.state_dict(),
                        reached=reached, errors=self.errors, history=self.history), f'{self.path}.new')
        os.replace(f'{self.path}.new', self.path)  # a kill leaves the old file or the new one


@torch.no_grad()
def agreement(model: nn.Module, teacher: nn.Module, images: Sequence[Tensor], batch_size: int = 64) -> Agreement:
    """Correlations of a model's outputs with a teacher's, in the precision of the models.

    "All tokens" are those of the last LayerNorm's output; "pooled" is the model's own output where that is one vector
    `(N, C)` an image, such as the class token or logits, else the mean of these tokens.

    Args:
        model, teacher (nn.Module): of one architecture, in eval mode.
        images (Sequence): floating tensors `(C, H, W)` as the models take them.
        batch_size (int): images of a forward pass.
    """
    device = next(model.parameters()).device
    own, pooled = [], ([], [])
    totals = torch.zeros(6, dtype=torch.float64, device=device)
    norms = dict.fromkeys(layer_norms(teacher))
    for start in range(0, len(images), batch_size):
        batch = _batch(images, torch.arange(start, min(start + batch_size, len(images))), device, 'images')
        pairs = []
        for each, rows in zip((model, teacher), pooled, strict=True):
            with _calls(each, norms, copied=False) as calls:
                output = each(batch)
            last = _first(calls[-1][-1])
            vector = output if isinstance(output, Tensor) and output.dim() == 2 else last.flatten(1, -2).mean(1)
            rows.append(vector.double())
            pairs.append(last.flatten(1).double())
        sums = torch.stack([torch.full_like(pairs[0][:, 0], pairs[0].shape[1]), *(x.sum(1) for x in pairs),
                            *(x.square().sum(1) for x in pairs), (pairs[0] * pairs[1]).sum(1)])
        own.append(_correlation(sums))
        totals += sums.sum(1)
    own = torch.cat(own)
    x, y = (torch.cat(rows) - torch.cat(rows).mean(0) for rows in pooled)
    shared = ((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt().clamp(min=TINY)).item()
    return Agreement(_correlation(totals).item(), shared if len(own) > 1 else None, own.quantile(0.1).item(),
                     own.min().item(), tuple(own.argsort()[:5].tolist()))


def _correlation(sums: Tensor) -> Tensor:
    """Of sums n, x, y, x^2, y^2 and x y along the first dimension."""
    n, x, y, x2, y2, xy = sums
    return (n * xy - x * y) / ((n * x2 - x.square()) * (n * y2 - y.square())).sqrt().clamp(min=TINY)


def _converted_norms(model: nn.Module, teacher: nn.Module) -> list[str]:
    """Names of the norms of the teacher that the model has offline norms for; a ConversionError if there are none."""
    names = layer_norms(teacher)
    if not names:
        raise ConversionError(f'teacher: {type(teacher).__name__} has no LayerNorm; take a copy of the model that was '
                              'made before convert_norms')
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.dtype not in (torch.float32, torch.float64):
            raise ConversionError(f'model: {name} is {weight.dtype}; train it in float32, bfloat16 is used inside')

    def rest(each: nn.Module) -> dict[str, torch.Size]:
        return {name: weight.shape for name, weight in each.named_parameters()
                if not any(name.startswith(f'{norm}.') for norm in names)}

    mine, theirs = rest(model), rest(teacher)
    if mine != theirs:
        name = next(name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name))
        raise ConversionError(f'teacher: of another architecture: {name} is {_shape(theirs.get(name))} in it and '
                              f'{_shape(mine.get(name))} in the model')
    found = [name for name in names
             if any(isinstance(module, OfflineNorm) for module in model.get_submodule(name).modules())]
    if not found:
        raise ConversionError(f'model: {type(model).__name__} has no norms to adapt; call convert_norms first')
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ConversionError('model: none of its weights requires a gradient')
    return found


def _shape(shape: torch.Size | None) -> str:
    return 'missing' if shape is None else str(tuple(shape))


def _parts(model: nn.Module, norms: set[nn.Module]) -> dict[str, int]:
    """Names of the parts that learn by themselves, and the dimension of the channels of their outputs.

    A part is the outermost module with norms that holds no list of further such modules: a block, a patch merging, a
    patch embedding; and each norm outside of these.
    """
    def holds(module: nn.Module) -> bool:
        return not norms.isdisjoint(module.modules())

    def is_split(module: nn.Module) -> bool:
        return any(isinstance(inner, (nn.Sequential, nn.ModuleList)) and any(
            child not in norms and holds(child) for child in inner.children()) for inner in module.modules())

    def visit(name: str, module: nn.Module) -> Iterator[str]:
        if module in norms or name and not is_split(module) and not isinstance(module, (nn.Sequential, nn.ModuleList)):
            yield name
            return
        for child, inner in module.named_children():
            if holds(inner):
                yield from visit(f'{name}.{child}' if name else child, inner)

    return {name: 1 if any(is_channels_first(norm) for norm in norms.intersection(model.get_submodule(name).modules()))
            else -1 for name in visit('', model)}


def _samples_tokens(model: nn.Module) -> bool:
    return any(f'{cls.__module__}.{cls.__qualname__}' == _VIT for cls in type(model).__mro__)


@contextmanager
def _sampled_tokens(models: Sequence[nn.Module], tokens: int | None, generator: torch.Generator) -> Iterator[None]:
    """Inside, the blocks of both models see the prefix tokens and the same random patch tokens of each image."""
    if tokens is None:
        yield
        return
    chosen = []

    def sample(module: nn.Module, args: tuple, kwargs: dict, x: Tensor) -> Tensor:
        prefix = models[0].num_prefix_tokens
        if not chosen:
            order = torch.rand(len(x), x.shape[1] - prefix, generator=generator).argsort(1)[:, :tokens] + prefix
            chosen.append(torch.cat([torch.arange(prefix).expand(len(x), -1), order], 1).to(x.device))
        return x.gather(1, chosen[0][..., None].expand(-1, -1, x.shape[-1]))

    with watched([model.patch_drop for model in models], sample):  # after the positional embedding
        yield


@contextmanager
def _calls(model: nn.Module, names: Mapping[str, object] | Sequence[str], copied: bool = True) -> Iterator[list]:
    """Inside, the list gets name, arguments, keyword arguments and output of each call of these modules."""
    calls, modules = [], {model.get_submodule(name): name for name in names}

    def add(module: nn.Module, args: tuple, kwargs: dict, output) -> None:
        keep = _copied if copied else lambda value: value
        calls.append((modules[module], keep(args), {key: keep(value) for key, value in kwargs.items()}, keep(output)))

    with watched(modules, add):
        yield calls


def _copied(value):
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if type(value) in (tuple, list) else value


def _first(output) -> Tensor:
    return _tensors(output)[0]


def _update(name: str, output: Tensor, args: tuple, norms: Sequence[str]) -> Tensor:
    """What a part adds to its input; of a norm, and of a part that changes the shape, the output."""
    is_residual = name not in norms and args and isinstance(args[0], Tensor) and args[0].shape == output.shape
    return output.float() - args[0].float() if is_residual else output.float()


def _relative_error(x: Tensor, wanted: Tensor) -> Tensor:
    """The squared error of each image over the variance of `wanted`, `(N,)`."""
    x, wanted = x.float().flatten(1), wanted.float().flatten(1)
    return (x - wanted).square().sum(1) / (wanted - wanted.mean(1, keepdim=True)).square().sum(1).clamp(min=TINY)


def _plain_norm(x: Tensor, axis: int) -> Tensor:
    x = x.float().movedim(axis, -1)
    return F.layer_norm(x, x.shape[-1:])


def _mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def _optimizer(weights: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.)


def _rate(lr: float, step: int, steps: int) -> float:
    warmup = min(WARMUP, steps // 10 + 1)
    return lr * min(1., step / warmup) * 0.5 * (1 + math.cos(math.pi * step / (steps + 1)))


def _autocast(images: Tensor) -> torch.autocast:
    kind = images.device.type
    if kind == 'cuda':
        has_it = torch.cuda.is_bf16_supported()
    else:
        capabilities = getattr(torch.cpu, 'get_capabilities', dict)()  # before torch 2.11 nothing tells: float32
        has_it = kind == 'cpu' and any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))
    return torch.autocast(kind, torch.bfloat16, enabled=has_it and images.dtype == torch.float32)


def _batch(images: Sequence, indices: Tensor, device: torch.device, name: str, floating: bool = True) -> Tensor:
    """Some images `(N, C, H, W)`, on a device."""
    if isinstance(images, Tensor):
        batch = images[indices.to(images.device)].to(device)
        if batch.dim() != 4:
            raise ConversionError(f'{name}: a tensor of shape {tuple(images.shape)}; must be (N, C, H, W)')
        return _floating(batch, name) if floating else batch
    found = []
    for i in indices.tolist():
        image = images[i][0] if isinstance(images[i], (tuple, list)) else images[i]
        if not isinstance(image, Tensor) or image.dim() != 3:
            what = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ConversionError(f'{name}[{i}]: {what}; must be a tensor (C, H, W)')
        if found and image.shape != found[0].shape:
            raise ConversionError(f'{name}[{i}]: {tuple(image.shape)}, others are {tuple(found[0].shape)}; one size')
        found.append(image)
    batch = torch.stack(found).to(device)
    return _floating(batch, name) if floating else batch


def _floating(images: Tensor, name: str) -> Tensor:
    if not images.is_floating_point():
        raise ConversionError(f'{name}: {images.dtype}; must be floating, normalized as the model takes it')
    return images
