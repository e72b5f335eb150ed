"""Code shared by the command-line tools.

A function that finds what cannot run raises a PreflightError, whose message is the one line that the tool prints.
"""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from ..registry import MISSING, missing_message

if MISSING:
    raise ImportError(missing_message('each tool of mmunorm'))


def run_tool(command: Sequence[str], cwd: str | os.PathLike | None = None) -> int:
    """Runs a tool as a user would; returns its exit status."""
    # Threads that spin while waiting slow down other processes tenfold.
    env = {'GOMP_SPINCOUNT': '20000', **os.environ}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env).returncode
