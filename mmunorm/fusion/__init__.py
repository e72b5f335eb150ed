"""Folding: offline norms go into the linear layers beside them, and a deployed model has none left."""
from . import rules, rules_timm  # noqa: F401  register themselves
from .algebra import FoldedNorm
from .checkpoint import folded_config, folded_made, folded_norms, load_folded, save_folded
from .fuse import FusionReport, NotFoldedError, fuse_norms
from .registry import Averages, Behind, Chain, Emits, Into, Reads, Stays, Unties, fold_rule

__all__ = [
    'Averages', 'Behind', 'Chain', 'Emits', 'FoldedNorm', 'FusionReport', 'Into', 'NotFoldedError', 'Reads',
    'Stays', 'Unties', 'fold_rule', 'folded_config', 'folded_made', 'folded_norms', 'fuse_norms', 'load_folded',
    'save_folded'
]
