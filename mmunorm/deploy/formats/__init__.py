"""The runtimes. A new one is a module of this package that registers a :class:`Format`."""
from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ...utils import PreflightError, nearest
from .base import REGISTERED, Format, Session, Variant

__all__ = ['FORMATS', 'VARIANTS', 'Format', 'Session', 'Variant', 'find_format', 'format_of', 'table']

for _module in iter_modules(__path__):
    import_module(f'{__name__}.{_module.name}')

FORMATS: dict[str, Format] = {name: form for name, form in REGISTERED.items() if form.is_offered}
# The rows of tools/deploy/benchmark.py by name: torch first, INT8 last.
VARIANTS: dict[str, tuple[Format, Variant]] = dict(sorted(
    ((name, (form, variant)) for form in REGISTERED.values() for name, variant in form.variants.items()),
    key=lambda item: (item[1][1].int8 is not None, item[1][0].name in FORMATS)))


def table() -> str:
    """The formats as text, for `--help`."""
    rows = [('format', 'suffix', 'runs in', '--int8'),
            *((form.name, form.suffixes[0], form.runtime, ', '.join(form.int8_kinds)) for form in FORMATS.values())]
    return '\n'.join(f'{name:10}  {suffix:12}  {runtime:18}  {kinds}'.rstrip() for name, suffix, runtime, kinds in rows)


def find_format(name: str) -> Format:
    """The format of a name such as 'onnx'. Raises a PreflightError if it is unknown."""
    if name not in FORMATS:
        raise PreflightError(f'--format must be one of {", ".join(FORMATS)}, got {name!r}'
                             f'{nearest(name.lower(), FORMATS)}')
    return FORMATS[name]


def format_of(path: str | Path) -> Format:
    """The format of a file, by its suffix. Raises a PreflightError if that is unknown, or `path` is no path."""
    if not isinstance(path, (str, Path)):
        raise PreflightError(f'path: must be that of a file, such as model.onnx, got {type(path).__name__}.')
    for form in sorted(FORMATS.values(), key=lambda form: -len(form.suffixes[0])):
        if Path(path).name.endswith(form.suffixes[0]):
            return form
    suffixes = ' or '.join(form.suffixes[0] for form in FORMATS.values())
    raise PreflightError(f'an exported model must have the suffix {suffixes}, got {path}.')
