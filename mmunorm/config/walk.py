"""All that is nested in a config."""
from __future__ import annotations

from collections.abc import Iterator, Mapping


def walk(value, key: str = '') -> Iterator[tuple[str, object]]:
    """A value, and all that its dicts, lists and tuples hold, each after its dotted name, which begins with `key`."""
    yield key, value
    if isinstance(value, Mapping):
        items = value.items()
    else:
        items = enumerate(value) if isinstance(value, (list, tuple)) else ()
    for name, inner in items:
        yield from walk(inner, f'{key}.{name}' if key else str(name))
