"""From a config to a model with weights, and the norms that a config can be given by name."""
