"""A vendor's Python as a process that compiles a model and holds it open in the vendor's simulator."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError

import numpy as np

from ...utils import PreflightError
from .protocol import receive, send

ROOT = Path(__file__).parents[3]  # of the repository, beside which `make` builds the environments
ERROR = re.compile(r'UNREACHABLE|Assert|\[E:onnxruntime|[Ee]rror\b|\bE \w+:|not support|Failed')


@dataclass(frozen=True)
class Vendor:
    """A vendor's package, and the Python that has it."""
    name: str  # of the environment .venv-NAME and of the script
    module: str  # to import
    package: str  # with its release

    @property
    def variable(self) -> str:
        """The environment variable that names the Python."""
        return f'MMUNORM_{self.name.upper()}_PYTHON'

    @property
    def script(self) -> Path:
        return Path(__file__).with_name(f'{self.name}_worker.py')

    def python(self) -> Path:
        """The Python that has the package: that of the variable, this one, or that of `make`.

        Raises a PreflightError if there is none.
        """
        if named := os.environ.get(self.variable):
            if not os.access(named, os.X_OK):
                raise PreflightError(f'{self.variable} must be a Python with {self.package}, and there is no program '
                                     f'{named}.')
            return Path(named)
        if find_spec(self.module):
            return Path(sys.executable)
        made = ROOT / f'.venv-{self.name}'
        if not (made / '.installed').exists():
            raise PreflightError(f"missing: {self.package}; install with 'make {made.name}/.installed' in a clone of "
                                 f'mmunorm, or set {self.variable} to the Python that has it.')
        return made / 'bin/python'


class Worker:
    """A process of a vendor's Python that runs the methods of the script's compiler; a PreflightError if there is none.

    Its working directory is a folder of its own, with a log of what the vendor prints, and `sources` to compile. They
    are deleted with this object; after an error a copy of the log stays.
    """

    def __init__(self, vendor: Vendor):
        self.vendor = vendor
        python = vendor.python()
        self.folder = tempfile.TemporaryDirectory(prefix=f'mmunorm_{vendor.name}_')
        self.log, self.sources = Path(self.folder.name, 'log'), Path(self.folder.name, 'sources')
        environment = {**os.environ, 'PATH': f'{python.parent}{os.pathsep}{os.environ["PATH"]}'}
        environment.pop('PYTHONPATH', None)
        with open(self.log, 'w') as log:
            self.process = subprocess.Popen(
                [python, '-u', vendor.script], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, cwd=self.folder.name, env=environment)
        self.close = weakref.finalize(self, _stop, self.process, self.folder)

    def call(self, method: str, *arrays: np.ndarray, **arguments) -> tuple[dict, list[np.ndarray]]:
        """The result of a method of the compiler.

        Raises a PreflightError with what the vendor printed if it fails, or if the process ends.
        """
        start = self.log.stat().st_size
        try:
            send(self.process.stdin, dict(call=method, **arguments), arrays)
            header, outs = receive(self.process.stdout)
        except (EOFError, OSError, UnpicklingError) as error:
            ended = f'{self.vendor.package} ended with exit code {self.process.wait()}'
            raise PreflightError(f'{ended}: {self._printed(start)}') from error
        if 'error' in header:
            raise PreflightError(f"{self.vendor.package} fails: {self._printed(start, header['error'])}")
        return header, outs

    def _printed(self, start: int, message: str = '') -> str:
        """The first error in the log after `start`, a message, and the path of a copy of the log."""
        printed = self.log.read_bytes()
        text = printed[start:].decode(errors='replace')
        lines = [line.strip() for line in re.split(r'[\r\n]+', re.sub(r'\x1b\[[\d;]*m', '', text)) if line.strip()]
        found = next((line for line in lines if ERROR.search(line)), message or 'no message')
        number, kept = tempfile.mkstemp(prefix=f'mmunorm_{self.vendor.name}_', suffix='.log')
        with open(number, 'wb') as file:
            file.write(printed)
        return f"{found[:300]}{'' if message in found else f' ({message[:300]})'}; all that it printed: {kept}"


def _stop(process: subprocess.Popen, folder: tempfile.TemporaryDirectory) -> None:
    """Ends a process by closing its input, and deletes its folder."""
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    folder.cleanup()
