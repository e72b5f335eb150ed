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

from ..utils import PreflightError, RunError, write_text


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
