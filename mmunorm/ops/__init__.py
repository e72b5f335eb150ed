"""The compiled operators that R-CNN needs, for an mmcv that was installed without a compiler.

`pip install` of mmcv without torch in its build environment gives a pure Python mmcv: `mmcv.ops`, and
with it most of mmdet, then fails for want of the module `mmcv._ext`. After :func:`install`, that name is
answered by `mmcv_ext.py` beside this file. Nothing is imported before someone asks for it.
"""
import sys
import warnings
from importlib.util import spec_from_file_location
from pathlib import Path

__all__ = ['install']


class _StandInFinder:
    """Finds `mmcv._ext` where no other finder does.

    It sits last on `sys.meta_path`, so a compiled `_ext` in mmcv's folder is always found first.
    """

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname != 'mmcv._ext':
            return None
        return spec_from_file_location(fullname, Path(__file__).with_name('mmcv_ext.py'))


def install() -> None:
    """Make `mmcv.ops` importable when mmcv has no compiled operators; leave a compiled mmcv as it is.

    Call it before mmdet is imported: mmdet's modules replace every operator whose import fails by a
    function that raises, and keep that function. A second call changes nothing.

    Warns:
        UserWarning: models of mmdet were imported already, and `mmcv.ops` was not importable then.
    """
    if _StandInFinder in sys.meta_path:
        return
    sys.meta_path.append(_StandInFinder)
    if 'mmcv.ops' not in sys.modules and any(m.startswith('mmdet.models.') for m in sys.modules):
        warnings.warn(
            'mmdet.models was imported before mmunorm, when mmcv had no operators, and parts of it '
            'keep functions that raise in their place. Restart Python and import mmunorm first.',
            stacklevel=2)
