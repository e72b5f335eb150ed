"""Packages that only a part of this one needs."""
from __future__ import annotations

from importlib.util import find_spec

from .errors import PreflightError


def check_installed(package: str, what: str, extra: str) -> None:
    """Checks that a package of `requirements/EXTRA.txt` is there; `what` needs it, a plural.

    Raises:
        PreflightError: it is missing; says how to install it.
    """
    if find_spec(package) is None:
        raise PreflightError(f"{what} need {package}: `pip install 'mmunorm[{extra}]'`, or "
                             f'`pip install -r requirements/{extra}.txt` in the folder of mmunorm.')
