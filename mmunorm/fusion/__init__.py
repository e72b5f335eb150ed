"""Folds offline norms into the adjacent linear layers, so that a deployed model has no norms."""
from .fuse import fuse_norms
from .reduced import FoldedNorm, TokenScale
from .report import FusionReport, NotExactError, NotFoldedError
from .rules import Example, Factor, Fills, Station, Stream, Unties, fold_rule

__all__ = ['Example', 'Factor', 'Fills', 'FoldedNorm', 'FusionReport', 'NotExactError', 'NotFoldedError', 'Station',
           'Stream', 'TokenScale', 'Unties', 'fold_rule', 'fuse_norms']
