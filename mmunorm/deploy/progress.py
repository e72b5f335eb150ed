"""The stage of a running export and its seconds, on a terminal."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm

_bars: list[tuple[str, tqdm]] = []


@contextmanager
def progress(title: str) -> Iterator[None]:
    """A context in which a terminal shows a title, the last :func:`stage` and the seconds, also inside of `silent`."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    done = Event()

    def refresh() -> None:
        while not done.wait(1):
            bar.refresh()

    # A copy, because `silent` redirects the standard error.
    with open(os.dup(sys.stderr.fileno()), 'w') as terminal, tqdm(
            desc=title, bar_format='{desc}, {elapsed}', file=terminal, leave=False, disable=None) as bar:
        clock = Thread(target=refresh, daemon=True)
        clock.start()
        _bars.append((title, bar))
        try:
            yield
        finally:
            _bars.pop()
            done.set()
            clock.join()


def stage(name: str) -> None:
    """Names what a running export does now; outside of :func:`progress` nothing happens."""
    if _bars:
        title, bar = _bars[-1]
        bar.set_description_str(f'{title}: {name}')
