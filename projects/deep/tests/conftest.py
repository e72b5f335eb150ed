from tests.tools.conftest import fake, impatient  # noqa: F401  fixtures
