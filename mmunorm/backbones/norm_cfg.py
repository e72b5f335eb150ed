"""What the backbones share about `norm_cfg`."""
from __future__ import annotations

DEFAULT_NORM_CFG = dict(type='UN')


def check_norm_cfg(norm_cfg: dict) -> dict:
    """`norm_cfg` itself.

    Raises:
        TypeError: it is not a dict with a `type`.
    """
    if not isinstance(norm_cfg, dict) or 'type' not in norm_cfg:
        raise TypeError(f'norm_cfg={norm_cfg!r}: must be a dict that names its type, '
                        "such as dict(type='UN')")
    return norm_cfg
