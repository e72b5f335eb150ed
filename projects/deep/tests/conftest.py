from projects.paper.tests.conftest import fake  # noqa: F401  fixtures
