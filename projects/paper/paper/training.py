"""Trains the runs of a comparison, each in a separate process of tools/train.py."""
from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from mmengine.config import Config
from tqdm import tqdm

from mmunorm.config.pretrained import pretrained_path
from mmunorm.utils import write_text

from .runs import ComparedRun, config_text

ROOT = Path(__file__).parents[3]
TRAIN = ROOT / 'tools/train.py'


def train_all(pending: Mapping[ComparedRun, Config], jobs: int,
              on_result: Callable[[dict[ComparedRun, str]], object],
              trusted: bool = False) -> dict[ComparedRun, str]:
    """Trains runs, `jobs` at a time, in the order of their configs; returns the errors by run.

    `on_result` is called after each run with the errors so far. `trusted` runs get `--trust-checkpoint`. If this
    process is interrupted, it terminates the runs.
    """
    # Spinning threads slow down other processes.
    env = {'GOMP_SPINCOUNT': '20000', **os.environ}
    env['PYTHONPATH'] = os.pathsep.join(filter(None, (str(ROOT), env.get('PYTHONPATH'))))  # for custom_imports
    if jobs > 1:
        env['OMP_NUM_THREADS'] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    errors, processes, stopping = {}, [], []

    def train(run: ComparedRun, cfg: Config) -> str | None:
        if problem := missing_weights(cfg):
            return problem
        run.work_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(TRAIN), str(run.config), '--work-dir', str(run.work_dir), '--resume',
                   *['--trust-checkpoint'] * trusted]
        # The child inherits the locked file, so a child that outlives this process is detected.
        with (run.work_dir / 'lock').open('w') as lock, run.log.open('a') as log:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 'another process is training it'
            write_text(run.config, config_text(cfg))
            print(f'$ {shlex.join(command)}', file=log, flush=True)
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, pass_fds=[lock.fileno()],
                                       start_new_session=True)
        processes.append(process)
        if stopping:
            end(process)
        status = process.wait()
        if run.close(status) is None:
            what = f'with status {status}' if status else 'without writing its final metrics'
            return f'tools/train.py ended {what}; see {run.log}'
        return None

    def end(process: subprocess.Popen) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # including data loader workers

    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(pending), desc='runs', unit='run', disable=None) as bar:
        futures = {pool.submit(train, *item): item[0] for item in pending.items()}
        try:
            for future in as_completed(futures):
                if problem := future.result():
                    errors[futures[future]] = problem
                on_result(errors)
                bar.update()
        except BaseException:
            stopping.append(True)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                if process.poll() is None:
                    end(process)
            raise
    return errors


def missing_weights(cfg: Config) -> str | None:
    """A sentence if the pretrained weights of a run are missing, else None."""
    path = pretrained_path(cfg)
    if path is None or '://' in path or os.path.isfile(path):
        return None
    return f'there are no backbone weights {path}'
