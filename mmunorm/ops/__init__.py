"""The compiled operators that R-CNN needs, for an mmcv that was installed without a compiler.

Without torch in its build environment, `pip install` gives a pure Python mmcv. `mmcv.ops` and most of mmdet then lack
the module `mmcv._ext`. After :func:`install`, `mmcv_ext.py` beside this file serves as that module.
"""
import sys
import warnings
from importlib.util import spec_from_file_location
from pathlib import Path

__all__ = ['install']


class _StandInFinder:
    """Finds `mmcv._ext` where no other finder does: last on `sys.meta_path`, after a compiled one in mmcv's folder."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname != 'mmcv._ext':
            return None
        return spec_from_file_location(fullname, Path(__file__).with_name('mmcv_ext.py'))


def install() -> None:
    """Makes `mmcv.ops` importable when mmcv has no compiled operators; leaves a compiled mmcv as it is.

    Call it before mmdet is imported, whose modules keep a function that raises in place of each missing operator.

    Warns:
        UserWarning: models of mmdet were imported already, and `mmcv.ops` was not importable then.
    """
    if _StandInFinder in sys.meta_path:
        return
    sys.meta_path.append(_StandInFinder)
    if 'mmcv.ops' not in sys.modules and any(m.startswith('mmdet.models.') for m in sys.modules):
        warnings.warn(
            'mmdet.models was imported before mmunorm, when mmcv had no operators. Parts of it now have '
            'functions that raise in their place. Restart Python and import mmunorm first.',
            stacklevel=2)
