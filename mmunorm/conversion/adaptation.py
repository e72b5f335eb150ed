"""Distillation of a converted model from its teacher with LayerNorm, without labels: block by block, then end to end.

Block by block, each part gets the teacher's input and learns the teacher's update, so that errors do not accumulate
over depth and training does not diverge. End to end, the outputs of the model are then trained to match the teacher's.
"""
from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset
from tqdm import tqdm

from ..modules import eval_mode, is_any, tensors_in
from ..norms import OfflineNorm
from ..norms.base import check_count
from ..norms.layers import is_channels_first
from ..norms.replace import layer_norms
from ..utils import check_module, error_text, plural, whole_file
from .agreement import Agreement, agreement, teacher_norms
from .calls import hooked, record_calls
from .images import batch_of, batches_of, evenly_spaced, floating, image_warnings, single_images
from .report import ConversionError
from .statistics import error_over_variance, mean_and_square, token_sums, tokens_of

BLOCKS, WHOLE = 'block by block', 'end to end'
HELD_OUT = 256  # maximum number of held-out images if the caller names none
CHECKS, CHECK_EVERY = 20, 10  # maximum number of checks on held-out images in a phase, and minimum steps between them
CHECKED_IMAGES, CHECKED_BATCHES = 64, 4  # maximum number of images and of batches of a check
ROLLBACK_RATIO = 1.5  # of the loss to the least one, from which on training returns to the best weights
ROLLBACK_LR_FACTOR = 0.3
WARMUP = 60  # steps, at most a tenth of all
SAME_START = 1e-3  # maximum relative difference of the norms of a resumed run
UNRELATED, SAME = 1., 0.005  # differences of the weights from the teacher's, relative to their size
AUGMENTED = 'images after augment'
_VIT = 'timm.models.vision_transformer.VisionTransformer'  # samples tokens where it drops patches


@dataclass(frozen=True)
class AdaptReport:
    """The result of :func:`adapt` on held-out images; `str()` returns a text."""
    agreements: dict[str, Agreement]  # by phase: 'converted', 'block by block', 'end to end'; those that had steps
    history: tuple[dict, ...]  # the checks: phase, step, loss, rate, tokens (the correlation over all of them)
    notes: tuple[str, ...]  # such as all tokens if windows do not allow sampling, skipped steps, or a continued run

    @property
    def norms(self) -> dict[str, tuple[float, float]]:
        """By name, the error of a norm's output before and after."""
        first, *_, last = self.agreements.values()
        return {name: (error, last.norms[name]) for name, error in first.norms.items()}

    def __str__(self) -> str:
        lines = [f'{phase}: {reached}' for phase, reached in self.agreements.items()]
        worst = ', '.join(map(str, list(self.agreements.values())[-1].worst_images))
        lines += [f'worst held-out images: {worst}', *self.notes, '', 'error of each norm, before and after:']
        return '\n'.join([*lines, *(f'  {name}  {old:.2%}  {new:.2%}' for name, (old, new) in self.norms.items())])


def mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrors each image `(N, C, H, W)` with a probability of 0.5."""
    flip = torch.rand(len(images), generator=generator).lt(0.5).to(images.device)
    return torch.where(flip[:, None, None, None], images.flip(-1), images)


@torch.inference_mode(False)
@torch.enable_grad()
def adapt(model: nn.Module, teacher: nn.Module, images, steps: int = 1000, *,
          block_steps: int | None = None, batch_size: int = 64, lr: float = 1e-4, block_lr: float = 2e-4,
          tokens: int | None = 64, held_out=None,
          augment: Callable[[Tensor, torch.Generator], Tensor] = mirrored, work_dir: str | os.PathLike | None = None,
          progress: bool = False) -> AdaptReport:
    """Trains a converted model in place to reproduce its teacher's outputs, without labels.

    First, `block_steps` steps block by block: every part with norms gets the teacher's input and learns the teacher's
    update, the output minus the input if their shapes agree. The loss is `log1p(|error|^2 / Var)` of each image,
    averaged over images and parts. Then, `steps` steps end to end. The loss has three terms: the same loss of the
    outputs of the model and of its last norm, 1 - cosine of each of their tokens, and the same loss of each part's
    output after a LayerNorm without parameters. Norms use their running statistics, so that training optimizes the map
    that is folded; the statistics are measured again at the end. The optimizer is AdamW with betas of 0.9 and 0.98,
    without weight decay, with gradients clipped to a norm of 1. Each phase has its own optimizer, warm-up and cosine
    schedule. Autocast uses bfloat16 if the CUDA device or the CPU supports it.

    Steps with a non-finite loss or gradient are skipped and counted in the notes. The loss on held-out images is
    measured up to 20 times in each phase. If it has risen by half or is not finite, training returns to the best
    weights with 0.3 times the learning rate. A phase ends with the best weights, also after an exception, or with the
    weights before the phase if the sum of their correlations was higher.

    Args:
        model (nn.Module): a model converted by :func:`mmunorm.convert_norms`, in float32 or float64. Weights that do
            not require gradients are not trained.
        teacher (nn.Module): the model with LayerNorm that it was converted from, on the same device.
        images: images that are valid inputs of the models after `augment`: a tensor `(N, C, H, W)`, a list of images
            `(C, H, W)`, batches, a data set, or a DataLoader, of which the data set is read. Images may be the first
            entry of a tuple, or the tensor in a dict. Batches are held in memory. If a data set has an attribute
            `paths`, the report names images by it. Smaller images in a batch are padded with zeros.
        steps, block_steps (int): training steps end to end and block by block. Default to 1000 and `steps / 3`.
        batch_size (int): images per step, at most all. Defaults to 64.
        lr, block_lr (float): learning rates end to end and block by block. Default to 1e-4 and 2e-4.
        tokens (int): number of random patch tokens of each image that a step uses, besides the class token and other
            prefix tokens, in timm's `VisionTransformer`. None and other models: all tokens. Defaults to 64.
        held_out: floating-point images like `images`, not augmented. Defaults to the last eighth of `images`, at most
            256, which are then not trained on; if there is only one image, to this image.
        augment: a function of a batch `(N, C, H, W)` on the model's device and a CPU generator. Defaults to
            :func:`mirrored`.
        work_dir (str): folder of `adapt.pt`, written at each check, whose `state_dict` has the best weights so far. If
            the run is killed, the same call resumes from it, if the images, the teacher and the model to start from
            are the same. None: nothing is written.
        progress (bool): show a progress bar with the correlation on held-out images, or, without a terminal, print a
            line at each check. Defaults to False.

    Raises:
        ValueError: a number is out of range.
        ConversionError: a ValueError, raised before the model is changed: the model has no converted norms, a model has
            half precision, the teacher has another architecture, unrelated weights, no LayerNorm or weights of the
            model, there are no images or outputs on them are not finite, there are no steps, or `work_dir` has a
            damaged state or that of another run.
    """
    check_count('steps', steps, 0)
    block_steps = steps // 3 if block_steps is None else check_count('block_steps', block_steps, 0)
    if not steps + block_steps:
        raise ConversionError(f'steps={steps}, block_steps={block_steps}: at least one step is needed')
    check_count('batch_size', batch_size, 1)
    check_count('tokens', 1 if tokens is None else tokens, 1)
    for name, rate in dict(lr=lr, block_lr=block_lr).items():
        if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:  # YAML reads 1e-4 as a str
            raise ConversionError(f'{name} must be a positive number, got {rate!r}')
    notes = _check_pair(model, teacher)
    images = single_images(images, 'images')
    held_out = None if held_out is None else single_images(held_out, 'held_out')
    number = len(images)
    measured_on = images if held_out is None else held_out
    names = list(map(str, getattr(measured_on, 'paths', ()))) or range(len(measured_on))
    if held_out is None:
        first = number - min(max(1, number // 8), HELD_OUT)
        held_out, names = Subset(images, range(first, number)), names[first:]
        notes += ['the one image is trained on and measured on'] if number == 1 else []
        number = max(1, first)
    if tokens is not None and not is_any(model, [_VIT]):
        tokens = None
        notes.append(f'all tokens in each step: {type(model).__name__} has windows or no patch_drop')

    def measured() -> Agreement:
        reached = agreement(model, teacher, held_out)
        return replace(reached, worst_images=tuple(names[i] for i in reached.worst_images))

    with eval_mode(model, teacher):
        run = _Run(model, teacher, images, number, held_out, augment, min(batch_size, number), tokens, progress)
        if work_dir is not None:
            run.open(Path(work_dir, 'adapt.pt'), dict(
                steps=steps, block_steps=block_steps, batch_size=batch_size, lr=lr, block_lr=block_lr, tokens=tokens,
                held_out=len(held_out)))
        if not run.reached:
            run.reached['converted'] = reached = measured()
            if not math.isfinite(reached.score):
                raise ConversionError(f'held_out: the outputs of {reached.worst_images[0]} are not finite')
        for phase, count, rate in ((BLOCKS, block_steps, block_lr), (WHOLE, steps, lr)):
            if count and phase not in run.reached:
                first = run.train(phase, count, rate)
                before, reached = list(run.reached.values())[-1], measured()
                if not reached.score >= before.score:
                    run.notes.append(f'{phase} made the whole model worse, so its weights are those before: {reached}')
                    _restore(run.weights, first)
                    reached = before
                run.reached[phase] = reached
        notes += image_warnings([run.checked], few=1)
        remeasure(model, batches_of(held_out, run.batch_size, run.device, 'held_out'))
    return AdaptReport(run.reached, tuple(run.history), (*notes, *run.notes))


class _Run:
    """The state of one adaptation."""

    def __init__(self, model, teacher, images, number, held_out, augment, batch_size, tokens, progress):
        self.model, self.teacher, self.images, self.number = model, teacher, images, number
        self.augment, self.batch_size, self.tokens, self.progress = augment, batch_size, tokens, progress
        self.norms = layer_norms(teacher)
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.device = self.weights[0].device
        first = floating(augment(batch_of(images, [0], self.device, 'images'), torch.Generator()), AUGMENTED)
        checked = evenly_spaced(len(held_out), min(CHECKED_IMAGES, CHECKED_BATCHES * batch_size))
        self.checked = floating(batch_of(held_out, checked, self.device, 'held_out'), 'held_out')
        self.autocast = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=(
            self.checked.dtype == torch.float32 and _has_bfloat16(self.device)))
        dims = {}

        def note_dims(module: nn.Module, args: tuple, kwargs: dict, output) -> None:
            dims[module] = next((tensor.dim() for tensor in tensors_in(output)), 2)

        for name, image in {AUGMENTED: first, 'held_out': self.checked[:1]}.items():
            try:
                with torch.no_grad(), hooked(teacher.modules(), note_dims):
                    outputs = list(tensors_in(teacher(image)))
            except Exception as error:
                raise ConversionError(f'{name}: {type(teacher).__name__} does not take {image.dtype} of '
                                      f'{tuple(image.shape)}: {error_text(error)}') from error
            if not outputs or not all(output.isfinite().all() for output in outputs):
                raise ConversionError(f'teacher: its output on the first of {name} is not finite, or no tensor')
        without_channels = {module for module, dim in dims.items() if dim < 2}
        self.parts = _parts(teacher, set(self.norms.values()), without_channels)
        self.file, self.saved = None, {}
        self.reached, self.history, self.notes = {}, [], []

    def open(self, path: Path, settings: dict) -> None:
        """Resumes from the file of a killed run, and writes to it at each check."""
        sampled = batch_of(self.images, evenly_spaced(len(self.images), CHECKED_IMAGES), torch.device('cpu'), 'images')
        self.file = _ResumeFile(path, self.model, self.norms, dict(
            settings, images=_checksum([sampled, self.checked], len(self.images)),
            teacher=_checksum([*self.teacher.parameters(), *self.teacher.buffers()]),
            augment=getattr(self.augment, '__qualname__', type(self.augment).__name__)))
        self.saved = self.file.read(self.device)
        if not self.saved:
            return
        self.model.load_state_dict(self.saved['state_dict'], strict=False)  # mmpretrain's SwinV2 drops tables
        self.reached = {phase: Agreement(**values) for phase, values in self.saved['reached'].items()}
        self.history, state = self.saved['history'], self.saved['state']
        self.notes = [*self.saved['notes'], f'continued from {path}, {state["phase"]}, step {state["step"]}']

    def save(self, state: dict, optimizer: torch.optim.Optimizer) -> None:
        now = _copies(self.weights)
        _restore(self.weights, state['best'])
        reached = {phase: asdict(result) for phase, result in self.reached.items()}
        self.file.write(state_dict=self.model.state_dict(), state={**state, 'best': None}, now=now, reached=reached,
                        optimizer=optimizer.state_dict(), history=self.history, notes=self.notes)
        _restore(self.weights, now)

    def train(self, phase: str, steps: int, lr: float) -> list[Tensor]:
        """One phase; the model ends with the weights of the least loss. Returns those at the beginning."""
        weights, optimizer, first = self.weights, _optimizer(self.weights), _copies(self.weights)
        if self.saved and self.saved['state']['phase'] == phase:
            state = dict(self.saved['state'], best=first)
            _restore(weights, self.saved['now'])
            optimizer.load_state_dict(self.saved['optimizer'])
        else:
            state = dict(phase=phase, step=0, begun=0, skipped=0, rate=lr, least=self.held_out_loss(phase), best=first,
                         first=first)
        every = max(CHECK_EVERY, steps // CHECKS)
        try:
            with tqdm(total=steps, initial=state['step'], desc=phase, unit='step',
                      disable=None if self.progress else True) as bar:
                for step in range(state['step'] + 1, steps + 1):
                    for group in optimizer.param_groups:
                        group['lr'] = _rate(state['rate'], step - state['begun'], steps - state['begun'])
                    state['skipped'] += not self.step(phase, step, optimizer)
                    bar.update()
                    if step % every and step != steps:
                        continue
                    now, state['step'] = self.held_out_loss(phase), step
                    if now <= state['least']:
                        state.update(least=now, best=_copies(weights))
                    elif not now < ROLLBACK_RATIO * state['least']:  # also if the loss is NaN
                        _restore(weights, state['best'])
                        state.update(rate=state['rate'] * ROLLBACK_LR_FACTOR, begun=step)
                        optimizer = _optimizer(weights)
                    tokens = agreement(self.model, self.teacher, self.checked).tokens
                    self.history.append(dict(phase=phase, step=step, loss=now, rate=state['rate'], tokens=tokens))
                    reached = f'correlation {tokens:.3f}, loss {now:.4f}'
                    bar.set_postfix_str(reached)
                    if self.progress and bar.disable:  # no terminal: a log file
                        print(f'{phase}, step {step} of {steps}: {reached}', flush=True)
                    if self.file is not None:
                        self.save(state, optimizer)
        finally:
            _restore(weights, state['best'])
            optimizer.zero_grad()
        if state['skipped']:
            self.notes.append(f'{phase}: {state["skipped"]} of {plural(steps, "step")} skipped, loss or gradient not '
                              'finite')
        return state['first']

    def step(self, phase: str, step: int, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether loss and gradient were finite."""
        # Seeded by the step, so that a resumed run uses the same random numbers.
        generator = torch.Generator().manual_seed(2 * step + (phase == WHOLE))
        chosen = torch.randperm(self.number, generator=generator)[:self.batch_size].tolist()
        images = self.augment(batch_of(self.images, chosen, self.device, 'images'), generator)
        loss = self.loss(phase, floating(images, AUGMENTED), generator)
        optimizer.zero_grad()
        if not loss.requires_grad:
            return True
        loss.backward()
        is_finite = nn.utils.clip_grad_norm_(self.weights, 1.).isfinite().item()
        if is_finite:
            optimizer.step()
        return is_finite

    @torch.no_grad()
    def held_out_loss(self, phase: str) -> float:
        generator = torch.Generator().manual_seed(0)
        return sum(self.loss(phase, images, generator).item() * len(images) / len(self.checked)
                   for images in self.checked.split(self.batch_size))

    def loss(self, phase: str, images: Tensor, generator: torch.Generator) -> Tensor:
        with _sampled_tokens((self.model, self.teacher), self.tokens, generator), self.autocast():
            with torch.no_grad(), record_calls(self.teacher, self.parts) as wanted:
                output = self.teacher(images)
            if phase == BLOCKS:
                return _mean(_relative_error(*(_update(output, args, name in self.norms) for output in (
                    self.model.get_submodule(name)(*args, **kwargs), target))) for name, args, kwargs, target in wanted)
            with record_calls(self.model, self.parts) as got:
                pairs = list(zip(tensors_in(self.model(images)), tensors_in(output), strict=True))
        pairs = [[_tokens(x, 1 if x.dim() == 4 else -1) for x in pair] for pair in pairs if pair[0].dim()]
        streams = [[_tokens(next(tensors_in(out)), self.parts[name]) for name, _, _, out in calls]
                   for calls in zip(got, wanted, strict=True)]
        pairs.append(streams[-1])
        return (_mean(_relative_error(*pair) for pair in pairs)
                + _mean(1 - F.cosine_similarity(*pair, dim=-1) for pair in pairs)
                + _mean(_relative_error(*(F.layer_norm(x, x.shape[-1:]) for x in pair)) for pair in streams))


class _ResumeFile:
    """A file of the state of a run and of what it depends on, so that the same call resumes it, and no other call."""

    def __init__(self, path: Path, model: nn.Module, norms: Iterable[str], settings: dict):
        values = model.state_dict()
        self.path, self.names = path, values.keys()
        # Norms are compared with a tolerance: the sums that they are fitted by depend on the number of threads.
        self.start = {name: value.clone() for name, value in values.items()
                      if any(name.startswith(f'{norm}.') for norm in norms)}
        self.settings = dict(
            settings, model=_checksum(value for name, value in values.items() if name not in self.start),
            trained=[name for name, weight in model.named_parameters() if weight.requires_grad])
        path.parent.mkdir(parents=True, exist_ok=True)

    def read(self, device: torch.device) -> dict:
        """The saved state; empty if there is no file. Raises a ConversionError if it is of another run."""
        if not self.path.is_file():
            return {}
        file = f'work_dir={str(self.path.parent)!r}: {self.path.name}'
        try:
            saved = torch.load(self.path, map_location=device, weights_only=True)
            settings, start, names = saved['settings'], saved['start'], saved['state_dict'].keys()
            is_same = saved['state'] and all(_is_near(start[name], self.start[name]) for name in start)
        except Exception as error:
            raise ConversionError(f'{file} is damaged or no state of an adaptation; delete it, or name another '
                                  'folder') from error
        other = [name for name, value in self.settings.items() if settings.get(name) != value]
        if start.keys() != self.start.keys() or not is_same or names != self.names:
            other.append('model')
        if other:
            raise ConversionError(f'{file} is of another adaptation: {", ".join(dict.fromkeys(other))} differ; delete '
                                  'it, or name another folder')
        return saved

    def write(self, **state) -> None:
        with whole_file(self.path) as part:
            torch.save(dict(state, settings=self.settings, start=self.start), part)


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
        norm.set_affine(*norm.affine(), *mean_and_square(total))


def _check_pair(model: nn.Module, teacher: nn.Module) -> list[str]:
    """Raises a ConversionError unless the model is a conversion of the teacher and can be trained.

    Returns a note if its weights, without norms, are not the teacher's; empty otherwise.
    """
    check_module(model)
    check_module(teacher, 'teacher')
    names = teacher_norms(teacher)
    for role, module in dict(model=model, teacher=teacher).items():
        for name, weight in module.named_parameters():
            if weight.is_floating_point() and weight.dtype not in (torch.float32, torch.float64):
                raise ConversionError(f'{role}: {name} is {weight.dtype}; train in float32, bfloat16 is used inside')
    shapes, teacher_shapes = (
        {name: str(tuple(weight.shape)) for name, weight in module.named_parameters()
         if not any(name.startswith(f'{norm}.') for norm in names)} for module in (model, teacher))
    for name in {**teacher_shapes, **shapes}:
        if shapes.get(name) != teacher_shapes.get(name):
            raise ConversionError(f'teacher: has another architecture: {name} is {teacher_shapes.get(name, "missing")} '
                                  f'in it and {shapes.get(name, "missing")} in the model')
    if not any(isinstance(part, OfflineNorm) for name in names for part in model.get_submodule(name).modules()):
        raise ConversionError(f'model: {type(model).__name__} has no norms to adapt; call convert_norms first')
    trained = {weight.data_ptr(): name for name, weight in model.named_parameters()
               if weight.requires_grad and weight.numel()}
    if not trained:
        raise ConversionError('model: none of its weights requires a gradient')
    for weight in teacher.parameters():
        if weight.data_ptr() in trained:
            raise ConversionError(f'teacher: shares {trained[weight.data_ptr()]} with the model; take a copy.deepcopy')
    difference, size = 0., 0.
    for name in shapes:
        x, y = (module.get_parameter(name).detach().double() for module in (model, teacher))
        difference += (x - y).square().sum().item()
        size += (x.square().sum() + y.square().sum()).item()
    share = (2 * difference / size) ** 0.5 if size else 0.  # 1.41 for independent weights
    what = f"the model's weights, without norms, differ from the teacher's by {share:.0%} of their size"
    if share > UNRELATED:
        raise ConversionError(f'teacher: {what}; pass the model that it was converted from')
    return [what] if share > SAME else []


def _parts(model: nn.Module, norms: set[nn.Module], without_channels: set[nn.Module]) -> dict[str, int]:
    """Names of the parts that learn by themselves, and the dimension of the channels of their outputs.

    A part is the outermost module with norms that holds no list of further such modules, and whose output has channels:
    a block, a patch merging, a patch embedding; and each norm outside of these.
    """
    parts: dict[str, int] = {}
    for name, module in model.named_modules():
        lists = [inner for inner in module.modules() if isinstance(inner, (nn.Sequential, nn.ModuleList))]
        listed = {child for modules in lists for child in modules if not norms.isdisjoint(child.modules())}
        inner_norms = norms.intersection(module.modules())
        is_part = name and listed <= norms and module not in (*lists, *without_channels)
        if inner_norms and (module in norms or is_part) and not any(name.startswith(f'{part}.') for part in parts):
            parts[name] = 1 if any(map(is_channels_first, inner_norms)) else -1
    return parts


@contextmanager
def _sampled_tokens(models: Sequence[nn.Module], tokens: int | None, generator: torch.Generator) -> Iterator[None]:
    """A context in which both models use the prefix tokens and the same random patch tokens of each image."""
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

    with hooked([model.patch_drop for model in models], sample):  # after the positional embedding
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


def _checksum(tensors: Iterable[Tensor], start: int = 0) -> int:
    for tensor in tensors:
        start = zlib.crc32(tensor.detach().cpu().flatten().view(torch.uint8).numpy(), start)
    return start


def _is_near(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x - y).double().norm() <= SAME_START * y.double().norm())


def _copies(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def _restore(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _optimizer(weights: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.)


def _rate(lr: float, step: int, steps: int) -> float:
    warmup = min(WARMUP, steps // 10 + 1)
    return lr * min(1., step / warmup) * 0.5 * (1 + math.cos(math.pi * step / (steps + 1)))


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported()
    capabilities = getattr(torch.cpu, 'get_capabilities', dict)()  # unknown before torch 2.11: float32
    return device.type == 'cpu' and any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))
