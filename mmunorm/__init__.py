"""Unified Normalization for vision Transformers, for OpenMMLab and plain PyTorch.

Importing the package registers its layers, backbones and hooks in mmengine's root registries, so that a config of any
OpenMMLab project finds them by name. Without OpenMMLab, the norms and the functions that take a model, such as
:func:`fuse_norms`, are available.
"""
import warnings

import torch

__version__ = '0.1.0'

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 1):
    raise ImportError(f'mmunorm needs torch 2.1 or newer, and this Python has {torch.__version__}.')

from .registry import MISSING, explain_missing, missing_message

if 'mmengine' not in MISSING:
    from mmengine.config.utils import MODULE2PACKAGE

    from . import ops

    # `_base_ = ['mmunorm::configs/NAME.py']`, as with mmengine's own packages.
    MODULE2PACKAGE.setdefault('mmunorm', 'mmunorm')

    # Before anything imports mmcv.ops.
    ops.install()

    if not MISSING:
        try:
            import mmpretrain.models  # noqa: F401
        except Exception as error:  # with transformers 5, an ImportError or a TypeError
            MISSING['mmpretrain'] = str(error)

    if not MISSING:
        from . import backbones  # noqa: F401
    else:
        warnings.warn(missing_message('mmunorm provides its norms and the functions of models; the rest'), stacklevel=2)
    from . import engine  # noqa: F401

from . import norms
from .checkpoints.folded import load_folded, save_folded
from .conversion import AdaptReport, ConversionReport, adapt, convert_norms, update_norms
from .deploy.api import Comparison, compare, export
from .fusion import FusionReport, fuse_norms, stock_rules  # noqa: F401
from .norms import *  # noqa: F403

__all__ = [
    'AdaptReport', 'Comparison', 'ConversionReport', 'FusionReport', '__version__', 'adapt', 'compare', 'convert_norms',
    'export', 'fuse_norms', 'load_folded', 'save_folded', 'update_norms'
]
__all__ += norms.__all__
__getattr__ = explain_missing(__name__, ('backbones', 'engine'))


def __dir__() -> list[str]:
    return sorted(__all__)
