"""The compiled operators of R-CNN, for an mmcv that was installed without a compiler.

Without torch in its build environment, `pip install` gives a pure Python mmcv. `mmcv.ops` and most of mmdet then lack
the module `mmcv._ext`. After :func:`install`, `mmcv_ext.py` in this folder is used as that module.
"""
import sys
import warnings
from importlib.util import spec_from_file_location
from pathlib import Path

__all__ = ['install']


class _StandInFinder:
    """Finds `mmcv._ext` if no other finder does: it is last on `sys.meta_path`, after a compiled one of mmcv."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname != 'mmcv._ext':
            return None
        return spec_from_file_location(fullname, Path(__file__).with_name('mmcv_ext.py'))


def install() -> None:
    """Makes `mmcv.ops` importable if mmcv has no compiled operators; does not change a compiled mmcv.

    Call it before mmdet is imported, whose modules replace each missing operator by a function that raises; warns if
    its models were.
    """
    if _StandInFinder in sys.meta_path:
        return
    sys.meta_path.append(_StandInFinder)
    if 'mmcv.ops' not in sys.modules and any(m.startswith('mmdet.models.') for m in sys.modules):
        warnings.warn(
            'mmdet.models was imported before mmunorm, when mmcv had no operators, so operators in its '
            'modules raise errors. Restart Python and import mmunorm first.',
            stacklevel=2)
