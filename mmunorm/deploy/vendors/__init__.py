"""Compilers of chips, each in the Python that has the vendor's package."""
