"""Folding: offline norms go into the linear layers beside them, and a deployed model has none left."""
from ..registry import explain_missing, lacks
from .fuse import fuse_norms
from .report import FusionReport, NotExactError, NotFoldedError
from .rewrite import FoldedNorm
from .rules import After, Averages, Chain, Emits, Factor, Into, Reads, Station, Stays, Stream, Unties, fold_rule

if not lacks('mmengine'):
    from .checkpoint import folded_config, folded_made, folded_norms, load_folded, save_folded
    from .hook import FuseNormsHook

__all__ = [
    'After', 'Averages', 'Chain', 'Emits', 'Factor', 'FoldedNorm', 'FuseNormsHook', 'FusionReport', 'Into',
    'NotExactError', 'NotFoldedError', 'Reads', 'Station', 'Stays', 'Stream', 'Unties', 'fold_rule', 'folded_config',
    'folded_made', 'folded_norms', 'fuse_norms', 'load_folded', 'save_folded'
]
__getattr__ = explain_missing(__name__, __all__)
