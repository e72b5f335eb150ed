"""Keeps what libraries say about themselves off the screen. A run's log file has all of it."""
from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

from mmengine.logging import MMLogger, logger

# How messages begin that no user can do anything about, or that are as long as a page.
_CHATTER = re.compile('|'.join((
    r'\n-+\nSystem environment', 'Config:\n', 'Hooks will be executed', 'Distributed training is not used',
    'Could not import OneDL', 'paramwise_options -- ', 'Loads checkpoint by ', 'Exp name: ', r'\w+_mAP_copypaste: ',
    '"FileClient" will be deprecated', '"HardDiskBackend" is the alias', '`save_param_scheduler` is True but ',
    'Because batch augmentations are enabled', 'The prefix is not set in metric class',
    r'\S+ is duplicate\. It is skipped since bypass_duplicate')))
_WARNINGS = ('faster_coco_eval is not installed', "Only use 'alpha' for pillow backend", 'Using a non-tuple sequence',
             r'torch\.searchsorted\(\): input value tensor is non-contiguous', r'torch\.meshgrid')


_held_back: list[str] = []


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Inside, libraries that are imported do not print what nobody can do anything about.

    mmengine's `print_log` itself stays as it is, for the modules that are imported here keep it. Only the `print` that
    it calls is another one inside.
    """
    with suppress(ImportError), warnings.catch_warnings(record=True) as caught:
        import torch.distributed.optim  # noqa: F401  mmengine imports it; 2.4 insists on a warning about TorchScript
    _held_back.extend(str(each.message) for each in caught)

    def print_what_matters(message):
        if _CHATTER.match(str(message)):
            _held_back.append(str(message))
        else:
            print(message)

    with mock.patch.object(logger, 'print', print_what_matters, create=True):
        yield


def print_held_back() -> None:
    """Prints what :func:`quiet_imports` has held back so far, for somebody who wants to see all."""
    while _held_back:
        print(_held_back.pop(0))


@contextmanager
def quiet_console() -> Iterator[None]:
    """Inside, screens show what concerns a user, of libraries' logs and warnings."""
    make_logger = MMLogger.__init__

    with ExitStack() as stack:

        def make_quiet_logger(self, *args, **kwargs):
            make_logger(self, *args, **kwargs)
            for handler in self.handlers:
                if type(handler) is logging.StreamHandler:
                    handler.addFilter(_concerns_a_user)
                    stack.callback(handler.removeFilter, _concerns_a_user)

        stack.enter_context(quiet_imports())
        stack.enter_context(mock.patch.object(MMLogger, '__init__', make_quiet_logger))
        stack.enter_context(warnings.catch_warnings())
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter('ignore', category)
        for message in _WARNINGS:
            warnings.filterwarnings('ignore', message)
        yield


def _concerns_a_user(record: logging.LogRecord) -> bool:
    return not _CHATTER.match(record.getMessage())
