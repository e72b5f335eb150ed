"""Runners in processes of their own, as users have them: one runtime a process."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection

import numpy as np

from ..utils import PreflightError
from .formats import Session
from .runner import Runner


class Worker(Runner):
    """A runner in another process, which does nothing between two batches.

    Args:
        open_session (Callable[[], Session]): opens it there; must pickle.

    Raises:
        Exception: what `open_session` raises.
        PreflightError: the process has ended.
    """

    def __init__(self, open_session: Callable[[], Session]):
        super().__init__(_Process(open_session))

    def seconds(self, *arrays: np.ndarray) -> float:
        """The time of one batch, right after another, so that caches and threads are those of a busy server."""
        self._session.ask(arrays)
        return self._session.ask(arrays)[1]

    def close(self) -> None:
        """Ends the process."""
        self._session.close()


class _Process(Session):

    def __init__(self, open_session: Callable[[], Session]):
        method = 'forkserver' if 'forkserver' in get_all_start_methods() else 'spawn'
        context = get_context(method)
        if method == 'forkserver':  # it forks from a process that has imported this package, and has no threads
            context.set_forkserver_preload([__name__])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, open_session), daemon=True)
        self.process.start()
        theirs.close()
        self.meta = self.reply()

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return self.ask(arrays)[0]

    def ask(self, arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], float]:
        """The outputs of a batch and the seconds that it took."""
        self.connection.send(arrays)
        return self.reply()

    def reply(self):
        try:
            reply = self.connection.recv()
        except EOFError:
            self.process.join()
            raise PreflightError(f'the process of this row ended with status {self.process.exitcode}.') from None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def _serve(connection: Connection, open_session: Callable[[], Session]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side ends this one
    try:
        runner = Runner(open_session())
    except Exception as error:  # the other side raises it
        connection.send(error)
        return
    connection.send(runner.meta)
    while True:
        try:
            arrays = connection.recv()
        except EOFError:
            return
        try:
            start = time.perf_counter()
            outputs = runner(*arrays)
            reply = list(outputs.values()), time.perf_counter() - start
        except Exception as error:  # the other side raises it
            reply = error
        connection.send(reply)
