"""For `python setup.py` of older tools; the package is described in pyproject.toml."""
from setuptools import setup

setup()
