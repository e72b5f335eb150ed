import pytest

from mmunorm.fusion import rules


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    """Rules that a test adds end with it."""
    monkeypatch.setattr(rules, '_RULES', dict(rules._RULES))
