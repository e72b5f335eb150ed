"""Code shared by the command-line tools."""
from ..registry import MISSING, what_is_missing

if MISSING:
    raise ImportError(what_is_missing('each tool of mmunorm'))
