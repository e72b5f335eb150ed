"""Folds offline norms into the adjacent linear layers, so that a deployed model has no norms."""
from .fuse import fuse_norms
from .joint import Consumer, JointFold
from .partial_calls import allow_partial_calls
from .reduced import FoldedNorm, StreamBasis, TokenScale, streams_of
from .report import FusionReport, NotExactError, NotFoldedError
from .rules import Example, Fills, fold_rule

__all__ = ['Consumer', 'Example', 'Fills', 'FoldedNorm', 'FusionReport', 'JointFold', 'NotExactError',
           'NotFoldedError', 'StreamBasis', 'TokenScale', 'allow_partial_calls', 'fold_rule', 'fuse_norms',
           'streams_of']
