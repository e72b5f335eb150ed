"""Errors that the tools print as one line."""


class PreflightError(Exception):
    """A run cannot start, for a reason that one sentence explains; exit status 2."""


class RunError(Exception):
    """A run was stopped on the way, for a reason that one sentence explains; exit status 3."""
