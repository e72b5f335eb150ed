"""Errors that one sentence explains. The command-line tools print that sentence and no traceback."""
import traceback


class PreflightError(Exception):
    """Something cannot start; exit status 2."""


class RunError(Exception):
    """A run was stopped on the way; exit status 3."""


class LocalError(RunError):
    """A run was stopped by something that only this process has seen, such as a picture that cannot be read."""


def describe(error: Exception) -> str:
    """Any exception as one line, with the place in the config that raised it."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = f'{type(error).__name__}: {" ".join(str(message).split())}'
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f'{text} ({place.filename}, line {place.lineno})' if place.name == '<module>' else text


def one_line(error: Exception) -> str:
    """The message of an OSError or of an error of this module, as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f'{error.filename}: {error.strerror}' if error.filename else error.strerror
    text = str(error).strip()
    if text.startswith('Caught ') and '\n' in text:
        # From a DataLoader's worker, with the traceback there; its last line has the name and the message.
        return text.splitlines()[-1].removeprefix(f'{type(error).__module__}.{type(error).__name__}: ')
    return ' '.join(text.split())
