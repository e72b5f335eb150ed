"""The base classes of formats: how a file is exported, opened and run."""
from __future__ import annotations

import logging
import math
import os
import re
import shlex
import sys
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ...registry import MISSING
from ...utils import PreflightError, error_text
from ..comparison import MIN_SNR
from ..graph import Exportable

KEY = 'mmunorm'  # of the metadata in the files
# Never closed: loggers of libraries that are imported in `silent` keep it.
_NOTHING = open(os.devnull, 'w')  # noqa: SIM115
# Installs the packages of the formats for edge devices beside mmpretrain, which their transformers would break.
EDGE_INSTALL = 'pip install --no-deps -r requirements/edge.txt in a clone of mmunorm'
DISTRIBUTIONS = {'ethosu': 'ethos-u-vela'}  # of packages with another name than their module


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
    tasks: tuple[str, ...] = ('classifier', 'detector', 'tensors')
    packages: tuple[str, ...] = ()  # required for exporting
    run_packages: tuple[str, ...] = ()  # required for running a file
    int8_kinds: tuple[str, ...] = ()  # the kinds of INT8, the default first
    takes_half: bool = True  # writes weights in float16, too
    takes_dynamic: bool = True  # writes graphs with dynamic shapes, too
    float_kinds: tuple[str, ...] = ()  # of `int8_kinds`, those whose files are in floating point for other compilers
    norms_as: dict[str, str] = {}  # by kind of INT8, what the runtime makes of a norm without weights
    takes_vendor_options: bool = False  # any, which the vendor's compiler checks
    is_offered: bool = True  # by tools/deploy/export.py
    uncalibrated: tuple[str, ...] = ()  # the kinds of INT8 that need no training images
    int8_packages: tuple[str, ...] = ()  # also required for exporting to INT8
    install: str = ''  # installs its packages beside mmpretrain, if their names alone do not
    # Options of tools/deploy/export.py for this format alone, keyword arguments of `export`: those of `add_argument`.
    options: dict[str, dict] = {}
    variants: dict[str, Variant] = {}  # its rows in a benchmark by name; the plain file has the format's name

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

    def check_options(self, names: Iterable[str]) -> None:
        """Raises a PreflightError if one of these is no option of this format."""
        if not self.takes_vendor_options and (unknown := sorted(set(names) - set(self.options))):
            raise PreflightError(f'{unknown[0]} is not an option of the format {self.name}.')

    def check_model(self, model: Exportable, half: bool = False) -> None:
        """Raises a PreflightError if this format does not support a model, or `half`."""
        if half and not self.takes_half or model.open_shapes and not self.takes_dynamic:
            option = 'half' if half and not self.takes_half else 'dynamic'
            raise PreflightError(f'--{option} is not supported by --format {self.name}.')
        task = model.meta['task']
        if task == 'features' and task not in self.tasks:
            others = ', '.join(form.name for form in REGISTERED.values() if form.is_offered and task in form.tasks)
            raise PreflightError(f'--format {self.name} has no --parts backbone: {others} have.')
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
               samples: Sequence[tuple[np.ndarray, ...]] = (), **options) -> list[str] | None:
        """Writes a model as files with the stem of `path`.

        With `half` weights are in float16; `int8` is one of `int8_kinds`, whose ranges are those of `samples`, batches
        of inputs. Returns lines of the report that :meth:`report` does not know. Raises a PreflightError if torch
        cannot export the model, or the format does not support it.
        """

    @abstractmethod
    def load(self, path: Path, threads: int | None, **options) -> Session:
        """Opens an existing file with a number of CPU threads, None for the runtime's choice. Raises any error."""

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
        return self.open(path)

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
    """Raises a PreflightError with the command to install them if one of these packages is missing.

    Beside mmpretrain that is `install`; otherwise pip gets their names, with the releases that mmunorm was tried with.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if not missing:
        return
    if not install or 'mmpretrain' in MISSING:
        names = [DISTRIBUTIONS.get(package, package.replace('_', '-')) for package in missing]
        with suppress(PackageNotFoundError):
            known = {re.split('[^A-Za-z0-9-]', line)[0]: line.partition(';')[0] for line in requires('mmunorm') or ()}
            names = [known.get(name, name) for name in names]
        install = f'pip install {shlex.join(names)}'
    raise PreflightError(f"missing: {', '.join(missing)}; install with {install}")


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
