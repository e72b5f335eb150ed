"""Measures of models and of their runs, and pictures of these measures."""
