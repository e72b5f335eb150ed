"""Folds offline norms into the adjacent linear layers, so that a deployed model has no norms."""
from .folds import JointFold, StreamBasis, Use
from .fuse import NotFoldedError, fuse_norms
from .layers import FoldedLayerNorm, FoldedNorm, FoldedRMSNorm
from .obstacles import Obstacle
from .report import FusionReport
from .rewrite import streams_of
from .rules import Example, Fills, fold_rule
from .scopes import allow_partial_calls
from .verify import NotExactError

__all__ = ['Example', 'Fills', 'FoldedLayerNorm', 'FoldedNorm', 'FoldedRMSNorm', 'FusionReport', 'JointFold',
           'NotExactError', 'NotFoldedError', 'Obstacle', 'StreamBasis', 'Use', 'allow_partial_calls', 'fold_rule',
           'fuse_norms', 'streams_of']
