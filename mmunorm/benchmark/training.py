"""Trains the runs of a comparison, each in a process of its own by tools/train.py."""
from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from mmengine.config import Config
from tqdm import tqdm

from ..analysis.curves import latest
from ..config.pretrained import pretrained_path
from ..utils import write_text
from .runs import ComparedRun, config_text

TRAIN = Path(__file__).parents[1] / '.mim/tools/train.py'


class Process:
    """A run while it is trained by tools/train.py."""

    def __init__(self, run: ComparedRun, cfg: Config, threads: int | None, trusted: bool):
        self.run = run
        run.work_dir.mkdir(parents=True, exist_ok=True)
        write_text(run.config, config_text(cfg))
        # The child inherits the open file, and with it the lock. So a child that outlives this process is noticed.
        with (run.work_dir / 'lock').open('w') as lock, run.log.open('a') as log:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            command = [sys.executable, str(TRAIN), str(run.config), '--work-dir', str(run.work_dir),
                       '--resume', *['--trust-checkpoint'] * trusted]
            # Threads that spin while they wait slow down a machine that has other work.
            env = {'GOMP_SPINCOUNT': '20000', **os.environ}
            if threads:
                env['OMP_NUM_THREADS'] = str(threads)
            log.write(f'$ {shlex.join(command)}\n')
            log.flush()
            self.popen = subprocess.Popen(command, env=env, stdout=log, stderr=log, pass_fds=[lock.fileno()],
                                          start_new_session=True)

    def stop(self) -> None:
        """Ends the run and the workers that load its data."""
        try:
            os.killpg(self.popen.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        self.popen.wait()

    def progress(self) -> str:
        """How far the run is."""
        step, loss = latest(self.run.work_dir, 'loss') or (None, None)
        return f'{self.run} starts' if step is None else f'{self.run}: step {step}, loss {loss:.3f}'


def train_all(pending: Mapping[ComparedRun, Config], jobs: int,
              after_each: Callable[[dict[ComparedRun, str]], object],
              trusted: bool = False) -> dict[ComparedRun, str]:
    """Trains runs, `jobs` at a time, in the order of their configs; returns what went wrong, by run.

    `after_each` is called after each run with what went wrong so far. `trusted` runs get `--trust-checkpoint`.
    """
    errors = {}
    threads = max(1, len(os.sched_getaffinity(0)) // jobs) if jobs > 1 else None
    queue, active = list(pending.items()), []
    with tqdm(total=len(queue), desc='runs', unit='run', disable=None) as bar, ExitStack() as stack:
        stack.callback(lambda: [process.stop() for process in active])
        while queue or active:
            while queue and len(active) < jobs:
                run, cfg = queue.pop(0)
                problem = missing_weights(cfg)
                if problem is None:
                    try:
                        active.append(Process(run, cfg, threads, trusted))
                        continue
                    except BlockingIOError:
                        problem = 'another process is training it'
                errors[run] = problem
                bar.update()
            for process in [process for process in active if process.popen.poll() is not None]:
                active.remove(process)
                status = process.popen.returncode
                if process.run.close(status) is None:
                    what = f'with status {status}' if status else 'without writing its final metrics'
                    errors[process.run] = f'tools/train.py ended {what}; see {process.run.log}'
                after_each(errors)
                bar.update()
            bar.set_postfix_str('; '.join(process.progress() for process in active))
            if active:
                time.sleep(1)
    return errors


def missing_weights(cfg: Config) -> str | None:
    """A sentence if the weights that a run starts from are missing, else None."""
    path = pretrained_path(cfg)
    if path is None or '://' in path or os.path.isfile(path):
        return None
    return f'there are no backbone weights {path}'
