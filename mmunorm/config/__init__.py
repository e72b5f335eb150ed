"""Configs: building their models, norm presets, and initial weights."""
