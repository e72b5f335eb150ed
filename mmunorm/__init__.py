"""Unified Normalization for vision Transformers in the OpenMMLab world.

Importing the package registers its layers, backbones and hooks in mmengine's root registries, so
that a config of any OpenMMLab project finds them by name.
"""
from importlib.util import find_spec

__version__ = '0.1.0'

_MISSING = [name for name in ('mmengine', 'mmcv', 'mmpretrain') if find_spec(name) is None]
if _MISSING:
    raise ImportError(
        f"mmunorm needs {', '.join(_MISSING)}, which this Python does not have. Beside OpenMMLab packages "
        "that you have, install it from the same distribution as those (mmcv or onedl-mmcv, never both); "
        "with none, run `pip install -e '.[onedl]'` in the folder of mmunorm.")

import torch  # noqa: E402

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 1):
    raise ImportError(f'mmunorm needs torch 2.1 or newer, and this Python has {torch.__version__}.')

from mmengine.config.utils import MODULE2PACKAGE  # noqa: E402

from . import ops  # noqa: E402

# `_base_ = ['mmunorm::configs/NAME.py']`, as with mmengine's own packages.
MODULE2PACKAGE.setdefault('mmunorm', 'mmunorm')

# Before anything imports mmcv.ops.
ops.install()

from .utils import quiet_imports  # noqa: E402

with quiet_imports():
    from . import (  # noqa: F401
        backbones,
        datasets,
        engine,
        enhancement,
        init,
        norms,
        recording,
        residuals,
        stock_rules,
        translation,
    )
from .conversion import convert_norms  # noqa: E402
from .fusion import fuse_norms  # noqa: E402
from .norms import (  # noqa: E402
    MABN,
    PN,
    RMSN,
    UN,
    DyT,
    NoNorm,
    PRepBN,
    RepBN,
    SyncUN,
    TokenBN,
    UN2d,
    convert_sync,
    replace_norms,
    revert_sync,
)

__all__ = [
    'MABN', 'PN', 'RMSN', 'UN', 'DyT', 'NoNorm', 'PRepBN', 'RepBN', 'SyncUN', 'TokenBN', 'UN2d',
    '__version__', 'convert_norms', 'convert_sync', 'fuse_norms', 'replace_norms', 'revert_sync'
]
