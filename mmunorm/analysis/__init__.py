"""Measures of models and of their runs, and images of these measures."""
