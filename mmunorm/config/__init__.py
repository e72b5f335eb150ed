"""Configs: their models, the norms that they can be given by name, and the weights that they start from."""
