"""What the backbones share about `norm_cfg`."""
DEFAULT_NORM_CFG = dict(type='UN')
