"""Measures of models and their pictures."""
