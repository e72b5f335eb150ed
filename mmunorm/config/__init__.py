"""Configs: building their models, norm presets, and initial weights. What is wrong with one is a PreflightError."""
