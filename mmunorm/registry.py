"""mmengine's registry of models, or a minimal replacement if mmengine is not installed."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

# The OpenMMLab packages that mmunorm needs and that cannot be imported, and why; '' for one that is not installed.
MISSING = {name: '' for name in ('mmengine', 'mmcv', 'mmdet', 'mmpretrain') if find_spec(name) is None}


def missing_message(what: str) -> str:
    """Why `what` cannot be used, and what to install."""
    if why := MISSING.get('mmpretrain'):
        return f'{what} needs mmpretrain, which cannot be imported here: {why}'
    return (f"{what} needs {', '.join(MISSING)}, which is not installed. If other OpenMMLab packages are "
            'installed, use the same distribution (mmcv or onedl-mmcv, never both); otherwise run '
            "`pip install '.[onedl]'` in a clone of mmunorm.")


def explain_missing(package: str, names: Sequence[str]) -> Callable[[str], object]:
    """The `__getattr__` of a package that lacks `names` without OpenMMLab: an ImportError lists what is missing."""
    def explain(name: str):
        if MISSING and name in names:
            raise ImportError(missing_message(f'{package}.{name}'))
        raise AttributeError(f'module {package!r} has no attribute {name!r}')

    return explain


if 'mmengine' in MISSING:

    class Registry:
        """The part of mmengine's Registry that this package uses."""

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
            """Builds the class `cfg['type']`, or the class of that name, with the other entries as arguments."""
            arguments = dict(cfg)
            name = arguments.pop('type')
            return (name if isinstance(name, type) else self.module_dict[name])(**arguments)

    MODELS = Registry('model')

    def registered(kind: str | Callable) -> Callable | None:
        """The class or function of a `type` in a config."""
        return MODELS.module_dict.get(kind) if isinstance(kind, str) else kind
else:
    from mmengine.registry import MODELS, Registry

    def registered(kind: str | Callable) -> Callable | None:
        """The class or function of a `type` in a config; a name may be that of the default scope."""
        with MODELS.switch_scope_and_registry(None) as registry:
            return registry.get(kind) if isinstance(kind, str) else kind
