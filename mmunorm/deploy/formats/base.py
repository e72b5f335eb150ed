"""What each runtime owes: how its file is made, opened and run."""
from __future__ import annotations

import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

import numpy as np
import torch

from ...utils import PreflightError, error_text
from ..exportable import Exportable

KEY = 'mmunorm'  # of the metadata in the files
# What installs the packages of the formats for edge devices.
EDGE_INSTALL = 'pip install --no-deps -r requirements/edge.txt'


class Session(ABC):
    """A model that is ready to run.

    Attributes:
        meta (dict | None): what the file says about itself, see :func:`describe_model`; None if that is nothing.
    """
    meta: dict | None

    @abstractmethod
    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs of one batch, in the order of `meta['outputs']`; `arrays` are float32, one for each input."""


@dataclass(frozen=True)
class Variant:
    """One row of a benchmark: its name for the reader, its kind of INT8, and what `Format.load` gets besides."""
    label: str
    int8: str | None = None
    how: dict = field(default_factory=dict)


class Format(ABC):
    """A runtime and its files."""
    name: str  # what `--format` takes
    suffixes: tuple[str, ...]  # of its files; the first is the one that is opened
    runtime: str  # its name for the reader
    tasks: tuple[str, ...] = ('classifier', 'detector')  # what its files do
    packages: tuple[str, ...] = ()  # what the export needs
    run_packages: tuple[str, ...] = ()  # what running a file needs
    int8_kinds: tuple[str, ...] = ()  # the kinds of INT8, the usual one first
    is_offered: bool = True  # by tools/deploy/export.py
    uncalibrated: tuple[str, ...] = ()  # those of them that need no training images
    int8_packages: tuple[str, ...] = ()  # what the export needs besides for INT8
    install: str = "pip install -e '.[deploy]'"  # gets its packages
    # What tools/deploy/export.py takes for it alone, by name: arguments of `argparse`'s `add_argument`. `export` gets
    # those that are given, as keyword arguments.
    options: dict[str, dict] = {}
    variants: dict[str, Variant] = {}  # its rows in a benchmark, by name; that of the plain file has the format's name

    def check(self, int8: bool = False) -> None:
        """Checks that this machine can export to it.

        Raises:
            PreflightError: a package is missing, or torch is too old.
        """
        need(*self.packages, *(self.int8_packages if int8 else ()), install=self.install)
        if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 9):
            raise PreflightError(f'the exporter needs torch 2.9 or newer, and this Python has {torch.__version__}.')

    def check_model(self, model: Exportable) -> None:
        """Checks that a file of this format can hold a model.

        Raises:
            PreflightError: it cannot.
        """
        if model.meta['task'] not in self.tasks:
            raise PreflightError(f'--format {self.name} takes {" and ".join(self.tasks)}, and '
                                 f'{model.meta["model"]} would be {model.meta["task"]}.')

    def int8_kind(self, kind: str | None) -> str | None:
        """The kind of INT8 that was asked for; '' is the usual one, None is floating point.

        Raises:
            PreflightError: the format has no such kind.
        """
        if kind and kind not in self.int8_kinds:
            raise PreflightError(f'--int8 of {self.name} must be one of {", ".join(self.int8_kinds)}, got {kind!r}.')
        return self.int8_kinds[0] if kind == '' else kind

    def needs_images(self, int8: str | None) -> bool:
        """Whether a kind of INT8 takes its ranges from training images."""
        return int8 is not None and int8 not in self.uncalibrated

    @abstractmethod
    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Sequence[tuple[np.ndarray, ...]] = (), **options) -> None:
        """Writes a model as files with the stem of `path`.

        Args:
            model (Exportable): what :func:`prepare_export` returns.
            path (Path): of the file that is opened.
            half (bool): weights in float16. Defaults to False.
            int8 (str, optional): one of `int8_kinds`.
            samples (Sequence[tuple[np.ndarray, ...]]): batches of inputs that the ranges of INT8 are taken from.
            **options: of `options`.

        Raises:
            PreflightError: torch cannot export the model, or the format cannot hold it.
        """

    @abstractmethod
    def load(self, path: Path, threads: int | None, **how) -> Session:
        """Opens an existing file, for so many threads of the CPU or the runtime's choice; raises what that raises."""

    def open(self, path: Path, threads: int | None = None, **how) -> Session:
        """As :meth:`load`.

        Raises:
            PreflightError: a file or the runtime is missing, the runtime does not load the file, or
                `tools/deploy/export.py` has not made it.
        """
        if not path.is_file():
            raise PreflightError(f'there is no exported model {path}.')
        for other in self.files(path):
            if not other.is_file():
                raise PreflightError(f'{path} needs its weights beside it, and there is no {other}.')
        need(*self.run_packages, install=self.install)
        try:
            session = self.load(path, threads, **how)
        except PreflightError:
            raise
        except Exception as error:  # the runtimes have no class of errors in common
            raise PreflightError(f'{path} cannot be loaded: {error_text(error)}') from error
        if not session.meta:
            raise PreflightError(f'{path} has no metadata of mmunorm: make it with tools/deploy/export.py.')
        return session

    def open_new(self, path: Path) -> Session:
        """What a file that :meth:`export` has just made is compared with torch by."""
        return self.open(path)

    def usage(self, path: Path) -> str:
        """How a file is used: a line."""
        return f'use it: python tools/deploy/infer.py {quote(str(path))} IMAGES --out-dir DIR'

    def report(self, path: Path) -> list[str]:
        """What tools/deploy/export.py prints about a new file besides its size: lines."""
        return []

    def files(self, path: Path) -> list[Path]:
        """All files of an exported model, by the path of the one that is opened."""
        return [path.with_suffix(suffix) for suffix in self.suffixes]

    def size(self, path: Path, model: Exportable) -> int:
        """Bytes that the files of an exported model have on the disk."""
        return sum(file.stat().st_size for file in self.files(path))


REGISTERED: dict[str, Format] = {}  # by name


def register_format(cls: type[Format]) -> type[Format]:
    """Makes a format known to the tools, by its `name`."""
    REGISTERED[cls.name] = cls()
    return cls


def need(*packages: str, install: str = Format.install) -> None:
    """Raises a PreflightError with the command that gets them if one of these packages is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise PreflightError(f"missing: {', '.join(missing)}; get it with {install}")


@contextmanager
def silent() -> Iterator[None]:
    """Inside, libraries print nothing: bars, sizes and hints for their developers."""
    with open(os.devnull, 'w') as nothing, redirect_stdout(nothing), redirect_stderr(nothing), \
            warnings.catch_warnings():
        warnings.simplefilter('ignore')
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        stderr = os.dup(2)
        os.dup2(nothing.fileno(), 2)  # of their C++
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            logging.disable(disabled)


def listed(counts: Counter[str]) -> str:
    """The most frequent names with their numbers."""
    return ', '.join(f'{name} {number}' for name, number in counts.most_common(6))


def counted(counts: Counter[str]) -> str:
    """The number of all, and :func:`listed`."""
    return f'{counts.total()}{", " if counts else ""}{listed(counts)}'
