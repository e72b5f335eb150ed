"""Keeps what libraries say about themselves off the screen. A run's log file has all of it."""
from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

import mmengine.logging
from mmengine.logging import MMLogger

# How messages begin that no user can do anything about, or that are as long as a page.
_CHATTER = re.compile('|'.join((
    r'\n-+\nSystem environment', 'Config:\n', 'Hooks will be executed', 'Distributed training is not used',
    'Could not import OneDL', 'paramwise_options -- ', 'Loads checkpoint by ', 'Exp name: ', r'\w+_mAP_copypaste: ',
    '"FileClient" will be deprecated', '"HardDiskBackend" is the alias', '`save_param_scheduler` is True but ',
    'Because batch augmentations are enabled', 'The prefix is not set in metric class',
    r'\S+ is duplicate\. It is skipped since bypass_duplicate')))
_WARNINGS = ('faster_coco_eval is not installed', "Only use 'alpha' for pillow backend", 'Using a non-tuple sequence',
             r'torch\.searchsorted\(\): input value tensor is non-contiguous', r'torch\.meshgrid')


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Inside, libraries that are imported do not print what nobody can do anything about."""
    with suppress(ImportError), warnings.catch_warnings(record=True):
        import torch.distributed.optim  # noqa: F401  mmengine imports it; 2.4 insists on a warning about TorchScript
    print_log = mmengine.logging.print_log

    def print_what_matters(message, logger=None, level=logging.INFO):
        if logger is not None or not _CHATTER.match(str(message)):
            print_log(message, logger, level)

    with mock.patch.object(mmengine.logging, 'print_log', print_what_matters):
        yield


@contextmanager
def quiet_console() -> Iterator[None]:
    """Inside, screens show what concerns a user, of libraries' logs and warnings."""
    make_logger = MMLogger.__init__

    def make_quiet_logger(self, *args, **kwargs):
        make_logger(self, *args, **kwargs)
        for handler in self.handlers:
            if type(handler) is logging.StreamHandler:
                handler.addFilter(_concerns_a_user)

    with ExitStack() as stack:
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
