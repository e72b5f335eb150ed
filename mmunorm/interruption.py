"""Ctrl+C while a tool imports its libraries, which takes seconds, is one line and status 130, as it is later.

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


def _is_tool(script: Path) -> bool:
    root = Path(__file__).resolve().parents[1]
    return script.stem == 'mmunorm' or any(script.is_relative_to(root / folder) for folder in ('tools', 'projects'))


def raise_again() -> None:
    """Lets Ctrl+C raise a KeyboardInterrupt again, after the imports."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_tool(
        Path(getattr(sys.modules['__main__'], '__file__', '/')).resolve()):
    signal.signal(signal.SIGINT, _stop)
