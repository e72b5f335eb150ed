"""The stages from a LayerNorm checkpoint to a tested file, each one of the tools."""
from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmengine.config import Config

from ..deploy.formats import VARIANTS
from ..utils import PreflightError, RunError, write_text

# Warm-up of UN, as a share of the training steps.
WARMUP = 0.5
# Learning rate after an adaptation, as a share of the config's: docs/results/conversion.md.
ADAPTED_RATE = 0.3


@dataclass(frozen=True)
class Stage:
    """One command of the chain."""
    title: str
    command: tuple[str, ...]  # a tool, and its arguments
    result: Path  # the file or folder that it writes
    prepare: Callable[[], None] | None = None  # called before the command

    def __str__(self) -> str:
        return f'python {shlex.join(self.command)}'


def run_tool(command: tuple[str, ...], cwd: str | os.PathLike | None = None) -> int:
    """Runs a tool as a user would; returns its exit status."""
    # Threads that spin while waiting slow down other processes tenfold.
    env = {'GOMP_SPINCOUNT': '20000', **os.environ}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env).returncode


def run_stages(stages: list[Stage], out: Path) -> dict[str, float]:
    """Runs the stages that are not done yet; returns the seconds that each took, by command.

    `out/ship.json` lists the finished stages; a PreflightError if it is of another chain. An interrupted training
    resumes. A RunError if a stage failed.
    """
    file = out / 'ship.json'
    done = json.loads(file.read_text()) if file.exists() else {}
    if others := [command for command in done if command not in map(str, stages)]:
        raise PreflightError(f'--out {out} has another chain, with `{others[0]}`: name another folder.')
    for number, stage in enumerate(stages, 1):
        print(f'\n=== {number}/{len(stages)} {stage.title}\n$ {stage}', flush=True)
        if str(stage) in done and stage.result.exists():
            print('=== is done', flush=True)
            continue
        if stage.prepare:
            stage.prepare()
        start = time.time()
        status = run_tool(stage.command)
        if status:
            raise RunError(f'the command above ended with status {status}. Once that is fixed, the same call of '
                           f'ship.py goes on from there.')
        done[str(stage)] = round(time.time() - start, 1)
        write_text(file, json.dumps(done, indent=1))
        print(f'=== done in {done[str(stage)]:.0f} s', flush=True)
    return done


def write_recipe(converted: Path, steps: int, path: Path, adapted: bool) -> None:
    """Writes the config of the training that follows a conversion: so many steps, with the teacher.

    The rate rises for a tenth of the steps and then falls along a cosine to a hundredth. An adapted model is near its
    goal, and gets a share of the config's own rate, which would first take it away from there.
    """
    cfg = Config.fromfile(converted)
    rise = max(1, steps // 10)
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=steps, val_begin=steps + 1)  # the next stage tests
    cfg.param_scheduler = [dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=rise)]
    if rise < steps:
        cfg.param_scheduler.append(dict(type='CosineAnnealingLR', eta_min_ratio=0.01, by_epoch=False, begin=rise,
                                        end=steps))
    cfg.optim_wrapper.clip_grad = dict(max_norm=1.0)
    if adapted:
        cfg.optim_wrapper.optimizer.lr *= ADAPTED_RATE
    cfg.log_processor = dict(by_epoch=False)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=max(1, min(1000, steps)))
    write_text(path, cfg.pretty_text)


def form_of(name: str, int8: str | None) -> str | None:
    """The row of `tools/deploy/benchmark.py` for a format and a kind of INT8; None if it has none."""
    return next((row for row, (format_, form) in VARIANTS.items()
                 if format_.name == name and form.int8 == int8 and not form.load_options), None)


def newest_metrics(work_dir: Path) -> dict[str, float]:
    """The metrics that a test tool wrote last under a work directory, without its times."""
    logs = [path for path in work_dir.glob('*/*.json') if path.stem == path.parent.name]
    metrics = json.loads(max(logs, key=lambda path: path.name).read_text())
    return {name: value for name, value in metrics.items() if '/' in name}
