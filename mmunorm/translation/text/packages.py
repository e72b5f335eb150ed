"""What the text of translations needs beyond the rest of the package."""
from __future__ import annotations

from importlib.util import find_spec

from ...errors import PreflightError


def check_installed(package: str, what: str) -> None:
    """Checks that a package of `requirements/translate.txt` is there; `what` needs it, a plural.

    Raises:
        PreflightError: it is missing; says how to install it.
    """
    if find_spec(package) is None:
        raise PreflightError(f"{what} need {package}: `pip install 'mmunorm[translate]'`, or "
                             '`pip install -r requirements/translate.txt` in the folder of mmunorm.')
