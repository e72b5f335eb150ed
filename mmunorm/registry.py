"""mmengine's registry of models, and what the norms, their conversion and their folding need where there is none."""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # something blocks its import
        return False


# Of the packages of OpenMMLab that the whole of mmunorm needs, those that this Python does not have.
MISSING = tuple(name for name in ('mmengine', 'mmcv', 'mmdet', 'mmpretrain') if not _is_installed(name))


_REASONS: dict[str, str] = {}


def mark_missing(package: str, error: ImportError) -> None:
    """Counts a package as missing that cannot be imported, such as mmpretrain beside transformers 5."""
    global MISSING
    MISSING = (*MISSING, package)
    _REASONS[package] = str(error)


def lacks(*packages: str) -> bool:
    """Whether one of these packages of OpenMMLab is missing."""
    return not set(packages).isdisjoint(MISSING)


def what_is_missing(what: str) -> str:
    """Why `what` cannot be used, and what to install."""
    if _REASONS:
        return f'{what} needs {", ".join(_REASONS)}, which cannot be imported here: {"; ".join(_REASONS.values())}'
    return (f"{what} needs {', '.join(MISSING)}, which this Python does not have. Beside OpenMMLab packages that you "
            'have, install it from the same distribution as those (mmcv or onedl-mmcv, never both); with none, run '
            "`pip install '.[onedl]'` in a clone of mmunorm.")


def explain_missing(package: str, names: Sequence[str]) -> Callable[[str], object]:
    """The `__getattr__` of a package that leaves `names` out where OpenMMLab is missing.

    Raises:
        ImportError: one of them is asked for; says what is missing.
    """
    def explain(name: str):
        if MISSING and name in names:
            raise ImportError(what_is_missing(f'{package}.{name}'))
        raise AttributeError(f'module {package!r} has no attribute {name!r}')

    return explain


if lacks('mmengine'):

    class Registry:
        """Classes by name, as far as this package asks mmengine's Registry."""

        def __init__(self, name: str, locations: Sequence[str] = ()):
            self.name = name
            self.module_dict: dict[str, type] = {}

        def register_module(self) -> Callable[[type], type]:
            """Registers a class under its own name."""
            def register(cls: type) -> type:
                self.module_dict[cls.__name__] = cls
                return cls

            return register

        def build(self, cfg: dict):
            """An instance of the class that `cfg['type']` is or names, with the other entries as its arguments.

            Raises:
                KeyError: there is no such class.
            """
            arguments = dict(cfg)
            name = arguments.pop('type')
            cls = name if isinstance(name, type) else self.module_dict.get(name)
            if cls is None:
                raise KeyError(f'there is no {self.name} {name!r}; without mmengine there are '
                               f'{", ".join(sorted(self.module_dict))}')
            return cls(**arguments)

    MODELS = Registry('model')

    def print_log(message: str, logger: str) -> None:
        """Shows a line, as mmengine's function does."""
        logging.getLogger('mmunorm').warning(message)
else:
    from mmengine.logging import print_log
    from mmengine.registry import MODELS, Registry

__all__ = ['MISSING', 'MODELS', 'Registry', 'explain_missing', 'lacks', 'print_log', 'what_is_missing']
