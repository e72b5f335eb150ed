"""Errors that one sentence explains. The command-line tools print that sentence and no traceback."""
import traceback


class PreflightError(Exception):
    """Something cannot start; exit status 2."""


class RunError(Exception):
    """A run was stopped on the way; exit status 3."""


def describe(error: Exception) -> str:
    """Any exception as one line, with the place in the config that raised it."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = f'{type(error).__name__}: {" ".join(str(message).split())}'
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f'{text} ({place.filename}, line {place.lineno})' if place.name == '<module>' else text
