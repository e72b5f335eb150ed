import gc

import pytest

from mmunorm.fusion import rules


@pytest.fixture(scope='session', autouse=True)
def _short_collections():
    """`fuse_norms` may collect garbage, which takes seconds with all that a test process has imported."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    """Rules that a test adds end with it."""
    monkeypatch.setattr(rules, '_RULES', dict(rules._RULES))
