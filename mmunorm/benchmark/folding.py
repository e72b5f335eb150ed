"""The benchmark of folding, from a config to a result and its table."""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from mmengine.config import Config
from torch import nn

from ..checkpoints.folded import save_folded
from ..compat import allow_recompilations
from ..tables import markdown_table
from ..utils import PreflightError, plural
from . import measure
from .environment import device_name, environment
from .models import LN, build_models, folded_name, norm_name
from .output import speed_cell, speedup
from .tasks import ClassifierTask, task_of

SEED = 0
AMP_DTYPES = {'fp16': torch.float16, 'bf16': torch.bfloat16}
COLUMNS = ('row', 'images/s (quartiles)', 'speed, x LN (quartiles)', 'ms/batch', 'peak memory MB', 'parameters M',
           'GFLOPs/image', 'norm calls', 'largest difference')


@dataclass
class Settings:
    """Settings of a measurement. None means a default that depends on task and device."""
    batch_size: int | None = None
    shape: tuple[int, int] | None = None  # height and width of the images
    device: str = 'cpu'  # or such as 'cuda:0'
    amp: str | None = None  # 'fp16' or 'bf16' runs under autocast
    compile: bool = False  # use torch.compile
    warmup: int | None = None  # untimed rounds, at least 1
    repeat: int | None = None  # timed rounds; in each, every model runs one batch
    threads: int | None = None  # CPU threads

    @classmethod
    def of_the_paper(cls, cfg: Config, **others) -> Settings:
        """The settings of Table 8: 512 images of 224 x 224, or 2 of 1333 x 800; 1000 batches. `others` win."""
        return cls(**task_of(cfg).paper | {key: value for key, value in others.items() if value is not None})


def run_benchmark(cfg: Config, settings: Settings, checkpoint: str | None = None, *, title: str | None = None,
                  save: str | None = None) -> dict:
    """Measures LN, LN folded exactly, the config's norm, the same folded, and no norm, in rotation on the same images.

    `cfg` is of a classifier of mmpretrain or a detector of mmdet; without a `checkpoint`, weights are random. `save` is
    a file for the folded model, see :func:`mmunorm.save_folded`. Returns a JSON-serializable dict: `title`, `notes`
    (what was timed, and how), `settings`, `environment`, `fusion` (the report of the folding), and `rows`. Each row has
    `name`, `parameters` (their number), `seconds` (of each repeat), `throughput`, `latency_ms`, `peak_memory` (bytes),
    `flops` (per image), `norm_calls`, `plain_calls` of what is left of folded LNs, and `to_ln`, the ratios to LN.
    Folded rows have `output_difference`.

    Raises:
        PreflightError: the config is not supported, see :func:`build_models`; or `save` is set and no norm folds.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device, task = torch.device(settings.device), task_of(cfg)
    settings = replace(
        settings, threads=torch.get_num_threads(),
        batch_size=settings.batch_size or task.default_batch_size.get(device.type, 1),
        shape=settings.shape or task.default_shape(cfg, device.type),
        # Under torch.compile the first round compiles.
        warmup=settings.warmup or (10 if device.type == 'cuda' else 2 if settings.compile else 1))
    plain = norm_name(cfg)
    models, fusion, meta = build_models(cfg, checkpoint, SEED)
    if save is not None:
        if not fusion.folded + fusion.reduced:
            raise PreflightError(f'--save {save}: no norm could be folded.\n{fusion}')
        save_folded(models[folded_name(plain)], save, cfg, fusion, meta)
    notes = _notes(task, settings, checkpoint, device)

    with torch.no_grad():
        timer, differences = prepare_models(models, plain, task, settings, device, notes)
        counted = {name: measure.count(model, timer.runs[name]) for name, model in models.items()}
        if settings.compile:
            torch._dynamo.reset()
            allow_recompilations(64)
            what = [task.compile(model) for model in models.values()][0]
            notes.append(f'Compiled with torch.compile: {what}. FLOPs, norm calls and the difference are '
                         'counted without it.')
        timer.time(settings.warmup, 'warming up')
        memory = {name: measure.peak_memory(run, device) for name, run in timer.runs.items()}
        seconds = timer.time(settings.repeat, 'measuring')
        settings.repeat = len(seconds[LN])

    rows = []
    for name, model in models.items():
        norm_calls, plain_calls, flops = counted[name]
        held = measure.size_in_memory([*model.parameters(), *model.buffers(), task.images])
        row = dict(name=name, parameters=sum(p.numel() for p in model.parameters()), seconds=seconds[name],
                   norm_calls=norm_calls, plain_calls=plain_calls, flops=flops / settings.batch_size,
                   peak_memory=memory[name] + held)
        if name in differences:
            row['output_difference'] = differences[name]
        rows.append(row)
    return dict(
        title=title or Path(cfg.filename or 'model').stem, checkpoint=checkpoint, notes=notes,
        settings=asdict(settings), environment=environment(device),
        fusion=dict(folded=len(fusion.folded), reduced=len(fusion.reduced), kept=len(fusion.kept), report=str(fusion)),
        rows=summarize(rows, settings.batch_size))


def prepare_models(models: dict[str, nn.Module], plain: str, task: ClassifierTask, settings: Settings,
                   device: torch.device, notes: list[str]) -> tuple[measure.InterleavedTimer, dict[str, dict]]:
    """Moves models and images to the device, makes their work equal, and compares the outputs of the folded models."""
    for model in models.values():
        model.to(device)
    mean = getattr(models[plain].data_preprocessor, 'mean', None)  # of each channel
    channels = 3 if mean is None else len(mean)
    images = torch.randint(256, (settings.batch_size, channels, *settings.shape), dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(SEED))
    task.load(models[plain], images.to(device))

    def call(method, *args):
        with precision(device, settings.amp):
            return method(*args)

    timer = measure.InterleavedTimer({name: partial(call, task.run, model) for name, model in models.items()}, device)
    differences = {}
    for name in dict.fromkeys((LN, plain)):  # the last is the reference
        outputs = call(task.outputs, models[name])
        folded = folded_name(name)
        differences[folded] = measure.largest_difference(call(task.outputs, models[folded]), outputs)
    notes += call(task.equalize, models[plain], outputs, list(models.values()))
    return timer, differences


def precision(device: torch.device, amp: str | None) -> AbstractContextManager:
    """Autocast to 'fp16' or 'bf16', or nothing for None."""
    return torch.autocast(device.type, AMP_DTYPES[amp]) if amp else nullcontext()


def _notes(task: ClassifierTask, settings: Settings, checkpoint: str | None, device: torch.device) -> list[str]:
    """Notes on the numbers for the reader."""
    height, width = settings.shape
    weights = (f'{checkpoint}; LN, exact and norm-free have the same weights outside their norms, but their outputs '
               'mean nothing' if checkpoint else
               f'random, with random statistics and affine parts in every norm (seed {SEED}); outputs are meaningless')
    memory = ("the peak of torch's CUDA allocator" if device.type == 'cuda' else
              "the peak of live tensor bytes, as torch's CPU allocator reports them to its profiler")
    return [
        f'Weights: {weights}.',
        'exact: LN, of which all that is linear is folded.',
        f'Timed: {task.about}.',
        f'Input: batches of {settings.batch_size}, {height} x {width} pixels of noise; '
        f'{f"autocast to {settings.amp}" if settings.amp else "float32"}; on {device_name(device)}'
        f'{f", {settings.threads} threads" if device.type == "cpu" else ""}.',
        'All rows run in one process, one batch each per round, in rotating order. Speeds and ratios to LN are '
        'medians over rounds, with their quartiles.',
        f'Memory: {memory}, weights and images of the row included. FLOPs: per image, matrix products and '
        'convolutions only (torch.utils.flop_counter), two per multiply-add.',
    ]


def summarize(rows: Sequence[dict], batch_size: int) -> list[dict]:
    """Rows of measurements with throughput, latency and the ratios to LN."""
    ln = next(row for row in rows if row['name'] == LN)
    return [dict(row, **measure.speed(row['seconds'], batch_size), to_ln=dict(
        throughput=measure.ratio(ln['seconds'], row['seconds']),
        latency_ms=measure.ratio(row['seconds'], ln['seconds']),
        **{key: row[key] / ln[key] for key in ('peak_memory', 'parameters', 'flops')})) for row in rows]


def markdown(result: dict) -> str:
    """A result of :func:`run_benchmark` as Markdown: title, notes and the table."""
    folded, reduced, kept = (result['fusion'][key] for key in ('folded', 'reduced', 'kept'))
    notes = [*result['notes'], f'Repeats: {result["settings"]["repeat"]}. In parentheses: relative to LN.',
             f'Folded: {folded} of {plural(folded + reduced + kept, "norm")}'
             f'{f", {reduced} now without weights" if reduced else ""}.']
    lines = [f'# {result["title"]}: effect of folding', '', *(f'- {note}' for note in notes), '',
             *markdown_table(COLUMNS, map(_cells, result['rows']))]
    if kept:
        lines += ['', 'Norms that were kept, and why:', '', '```', result['fusion']['report'], '```']
    return '\n'.join(lines) + '\n'


def _cells(row: dict) -> list[str]:
    to_ln = row['to_ln']
    cells = [
        row['name'], speed_cell(row['throughput']),
        speedup(to_ln['throughput']) if row['name'] != LN else '-',
        f'{row["latency_ms"]["median"]:.4g}',
        f'{row["peak_memory"] / 1e6:.1f} ({to_ln["peak_memory"]:.3f}x)',
        f'{row["parameters"] / 1e6:.3f} ({to_ln["parameters"]:.3f}x)',
        f'{row["flops"] / 1e9:.4g} ({to_ln["flops"]:.3f}x)',
        str(row['norm_calls']) + (f', {row["plain_calls"]} without weights' if row['plain_calls'] else ''),
    ]
    if difference := row.get('output_difference'):
        cells.append(f'{difference["absolute"]:.2g} ({difference["relative"]:.2g} of the largest output)')
    return cells
