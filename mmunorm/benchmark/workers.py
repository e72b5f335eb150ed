"""Sessions in separate processes, one runtime per process, as in deployment."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_all_start_methods, get_context

import numpy as np

from ..deploy.formats import Session
from ..deploy.runtime import ExportedModel
from ..utils import PreflightError

_runner: ExportedModel  # of a process that a worker has started


class Worker(Session):
    """A session in another process, in which the picklable `open_session` is called.

    Raises its errors, and a PreflightError if the process exits.
    """

    def __init__(self, open_session: Callable[[], Session]):
        context = get_context('forkserver' if 'forkserver' in get_all_start_methods() else 'spawn')
        context.set_forkserver_preload([__name__])  # forks from a process without threads
        self.pool = ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))  # this side ends it
        try:
            self.meta = self.call(_open, open_session)
        except Exception:
            self.close()
            raise

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return self.call(_run, arrays)[0]

    def seconds(self, *arrays: np.ndarray) -> float:
        """The time of one batch directly after another, so that caches and threads are warm."""
        self.call(_run, arrays)
        return self.call(_run, arrays)[1]

    def close(self) -> None:
        """Ends the process."""
        self.pool.shutdown()

    def call(self, function: Callable, *args):
        try:
            return self.pool.submit(function, *args).result()
        except BrokenProcessPool:
            raise PreflightError('the process of this row has ended: it crashed, or ran out of memory.') from None


def _open(open_session: Callable[[], Session]) -> dict:
    global _runner
    _runner = ExportedModel(open_session())
    return _runner.meta


def _run(arrays: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
    """The outputs of a batch, and its duration in seconds."""
    start = time.perf_counter()
    outputs = _runner(*arrays)
    return list(outputs.values()), time.perf_counter() - start
