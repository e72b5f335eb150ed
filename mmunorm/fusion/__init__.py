"""Folding: offline norms go into the linear layers beside them, and a deployed model has none left."""
from .checkpoint import folded_config, folded_made, folded_norms, load_folded, save_folded
from .fuse import fuse_norms
from .hook import FuseNormsHook
from .report import FusionReport, NotFoldedError
from .rewrite import FoldedNorm
from .rules import Averages, Behind, Chain, Emits, Into, Reads, Stays, Stream, Unties, fold_rule

__all__ = [
    'Averages', 'Behind', 'Chain', 'Emits', 'FoldedNorm', 'FuseNormsHook', 'FusionReport', 'Into', 'NotFoldedError',
    'Reads', 'Stays', 'Stream', 'Unties', 'fold_rule', 'folded_config', 'folded_made', 'folded_norms', 'fuse_norms',
    'load_folded', 'save_folded'
]
