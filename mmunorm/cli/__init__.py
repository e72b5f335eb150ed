"""Code shared by the command-line tools.

A function that finds what cannot run raises a PreflightError, whose message is the one line that the tool prints.
"""
from ..registry import MISSING, missing_message

if MISSING:
    raise ImportError(missing_message('each tool of mmunorm'))
