"""Checkpoint files: read as plain data, loaded whole, in the layouts of other projects, and those of folded models."""
