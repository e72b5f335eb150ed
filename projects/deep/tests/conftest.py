from tests.tools.conftest import fake  # noqa: F401  fixtures
