"""The base classes of formats: how a file is exported, opened and run."""
from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ...utils import PreflightError, error_text
from ..comparison import MIN_SNR
from ..graph import Exportable

Batches = Sequence[tuple[np.ndarray, ...]]  # of a file's inputs
KEY = 'mmunorm'  # of the metadata in the files
# Never closed: loggers of libraries that are imported in `silent` keep it.
_NOTHING = open(os.devnull, 'w')  # noqa: SIM115
# Without dependencies: their transformers would break mmpretrain.
EDGE_INSTALL = 'pip install --no-deps -r requirements/edge.txt'


class Session(ABC):
    """An opened model."""
    meta: dict | None  # metadata of the file, see :func:`describe_model`; None if it has none

    @abstractmethod
    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs of one batch, in the order of `meta['outputs']`; `arrays` are float32, one for each input."""


@dataclass(frozen=True)
class Variant:
    """One row of a benchmark: its label, its kind of INT8, and arguments of `Format.load`."""
    label: str
    int8: str | None = None
    load_options: dict = field(default_factory=dict)


class Format(ABC):
    """A runtime and its files; `path` is always that of the file to open."""
    name: str  # value of `--format`
    suffixes: tuple[str, ...]  # of its files; the first is that of the file to open
    runtime: str  # label
    session: type[Session]  # is made of a path and a number of threads
    tasks: tuple[str, ...] = ('classifier', 'detector', 'features', 'tensors')
    packages: tuple[str, ...] = ()  # required for exporting
    run_packages: tuple[str, ...] = ()  # required for running a file
    int8_kinds: tuple[str, ...] = ()  # the kinds of INT8, the default first
    takes_half: bool = True  # writes weights in float16, too
    takes_dynamic: bool = True  # writes graphs for any number of images, too
    float_kinds: tuple[str, ...] = ()  # of `int8_kinds`, those whose files are in floating point for other compilers
    takes_vendor_options: bool = False  # keyword arguments of `export`, which the vendor's compiler checks
    is_offered: bool = True  # by tools/deploy/export.py
    uncalibrated: tuple[str, ...] = ()  # the kinds of INT8 that need no training images
    int8_packages: tuple[str, ...] = ()  # also required for exporting to INT8
    install: str = "pip install '.[deploy]'"  # installs its packages, in a clone of mmunorm
    variants: dict[str, Variant] = {}  # its rows in a benchmark by name; the plain file has the format's name
    _opened: Session | None = None  # of a file just written, if `export` has opened it

    def check(self, int8: str | None = None, option: str = 'int8') -> str | None:
        """The kind of INT8, None for floating point, of a requested one; '' is the default.

        Raises a PreflightError, with the name of the caller's `option`, if the format has no such kind, a package is
        missing, or torch is too old.
        """
        if int8 is not None and not self.int8_kinds:
            raise PreflightError(f'{option}: {self.name} has no INT8.')
        if int8 not in (None, '', *self.int8_kinds):
            raise PreflightError(f'{option} of {self.name} must be one of {", ".join(self.int8_kinds)}, got {int8!r}.')
        need(*self.packages, *(self.int8_packages if int8 is not None else ()), install=self.install)
        if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 9):
            raise PreflightError(f'the exporter needs torch 2.9 or newer, but {torch.__version__} is installed.')
        return self.int8_kinds[0] if int8 == '' else int8

    def check_options(self, options: dict) -> None:
        """Raises a PreflightError if there is an option, and this format has none."""
        if options and not self.takes_vendor_options:
            raise PreflightError(f'{next(iter(options))} is not an option of the format {self.name}.')

    def check_model(self, model: Exportable, half: bool = False) -> None:
        """Raises a PreflightError if this format does not support a model, or `half`."""
        if half and not self.takes_half or model.dynamic and not self.takes_dynamic:
            option = 'half' if half and not self.takes_half else 'dynamic'
            raise PreflightError(f'--{option} is not supported by --format {self.name}.')
        task = model.meta['task']
        if task not in self.tasks:
            raise PreflightError(f'--format {self.name} supports {" and ".join(self.tasks)}, but '
                                 f'{model.meta["model"]} would be {task}.')

    def needs_images(self, int8: str | None) -> bool:
        """Whether a kind of INT8 needs training images for calibration."""
        return int8 is not None and int8 not in self.uncalibrated

    def least_snr(self, half: bool, int8: str | None) -> float:
        """The SNR in dB below which a file is refused."""
        return -math.inf if half or int8 and int8 not in self.float_kinds else MIN_SNR

    @abstractmethod
    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Batches = (), **options) -> list[str] | None:
        """Writes a model as files with the stem of `path`.

        With `half` weights are in float16; `int8` is one of `int8_kinds`, whose ranges are those of `samples`, batches
        of inputs. Returns lines of the report that :meth:`report` does not know. Raises a PreflightError if torch
        cannot export the model, or the format does not support it.
        """

    def load(self, path: Path, threads: int | None, **options) -> Session:
        """Opens an existing file with a number of CPU threads, None for the runtime's choice. Raises any error."""
        return self.session(path, threads, **options)

    def open(self, path: Path, threads: int | None = None, **options) -> Session:
        """Like :meth:`load`; any error is a PreflightError, such as a missing file or runtime, or a file of others."""
        if not path.is_file():
            raise PreflightError(f'there is no exported model {path}.')
        for other in self.files(path):
            if not other.is_file():
                raise PreflightError(f'{path} needs its weights beside it, and there is no {other}.')
        need(*self.run_packages, install=self.install)
        try:
            session = self.load(path, threads, **options)
        except PreflightError:
            raise
        except Exception as error:  # the runtimes have no common base class of errors
            raise PreflightError(f'{path} cannot be loaded: {error_text(error)}') from error
        if not session.meta:
            raise PreflightError(f'{path} has no metadata of mmunorm: export it with mmunorm.export or '
                                 'tools/deploy/export.py.')
        return session

    def open_new(self, path: Path) -> Session:
        """Opens a file just written by :meth:`export` for the comparison with torch."""
        session, self._opened = self._opened, None
        return session or self.open(path)

    def usage(self, path: Path) -> str:
        """One line on how to use a file."""
        return f'use it: python tools/deploy/infer.py {shlex.quote(str(path))} IMAGES --out-dir DIR'

    def report(self, path: Path) -> list[str]:
        """Lines that tools/deploy/export.py prints about a new file."""
        return []

    def files(self, path: Path) -> list[Path]:
        """All files of an exported model."""
        return [path.with_name(path.name.removesuffix(self.suffixes[0]) + suffix) for suffix in self.suffixes]

    def size(self, path: Path, model: Exportable) -> int:
        """Size of the files of an exported model in bytes."""
        return sum(file.stat().st_size for file in self.files(path))


REGISTERED: dict[str, Format] = {}  # by name


def register_format(cls: type[Format]) -> type[Format]:
    """Registers a format for the tools, by its `name`, which no other format may have."""
    if cls.name in REGISTERED:
        raise ValueError(f'{cls.__name__}.name {cls.name!r} is that of {type(REGISTERED[cls.name]).__name__} already')
    REGISTERED[cls.name] = cls()
    return cls


def need(*packages: str, install: str = '') -> None:
    """Raises a PreflightError with the command that installs them, by default pip's, if a package is missing."""
    if missing := [package for package in packages if find_spec(package) is None]:
        command = f'{install} in a clone of mmunorm' if install else f'pip install {" ".join(missing)}'
        raise PreflightError(f"missing: {', '.join(missing)}; install with {command}")


def stage(name: str) -> None:
    """Prints what an export does now, where progress bars are; not within :func:`silent`."""
    print(f'export: {name}', file=sys.stderr, flush=True)


@contextmanager
def silent() -> Iterator[None]:
    """A context that suppresses the output of libraries, such as progress bars."""
    with redirect_stdout(_NOTHING), redirect_stderr(_NOTHING), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        disabled, handlers = logging.root.manager.disable, logging.root.handlers[:]
        logging.disable(logging.WARNING)
        stderr = os.dup(2)
        os.dup2(_NOTHING.fileno(), 2)  # for C++ code
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            logging.disable(disabled)
            logging.root.handlers[:] = handlers


def listed(counts: Counter[str]) -> str:
    """The most frequent names with their counts."""
    return ', '.join(f'{name} {number}' for name, number in counts.most_common(6))


def counted(counts: Counter[str]) -> str:
    """The total count, and :func:`listed`."""
    return f'{counts.total()}{", " if counts else ""}{listed(counts)}'
