"""Ctrl+C while a tool imports its libraries, which takes seconds, prints one line and exits with status 130.

Importing this module is enough.
"""
from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def _stop(*_) -> None:
    # A KeyboardInterrupt would be lost, or become another error, in what libraries do while they are imported.
    os.write(2, b'interrupted\n')
    os._exit(130)


def running_tool() -> str:
    """The tool of this repository that Python runs, such as 'tools/train.py'; '' if it runs something else."""
    root, script = Path(__file__).resolve().parents[1], _script()
    is_tool = any(script.is_relative_to(root / folder) for folder in ('tools', 'projects'))
    return str(script.relative_to(root)) if is_tool else ''


def _script() -> Path:
    return Path(getattr(sys.modules['__main__'], '__file__', '/')).resolve()


def raise_again() -> None:
    """Lets Ctrl+C raise a KeyboardInterrupt again, after the imports."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler and (running_tool() or _script().stem == 'mmunorm'):
    signal.signal(signal.SIGINT, _stop)
