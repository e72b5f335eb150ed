"""Code shared by the command-line tools.

A function that finds what cannot run raises a PreflightError, whose message is the one line that the tool prints.
"""
from ..registry import MISSING, what_is_missing

if MISSING:
    raise ImportError(what_is_missing('each tool of mmunorm'))
