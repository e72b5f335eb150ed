"""Folds offline norms into the adjacent linear layers, so that a deployed model has no norms."""
from .fuse import fuse_norms
from .joint import Consumer, JointFold
from .reduced import FoldedNorm, TokenScale
from .report import FusionReport, NotExactError, NotFoldedError
from .rules import Example, Fills, fold_rule

__all__ = ['Consumer', 'Example', 'Fills', 'FoldedNorm', 'FusionReport', 'JointFold', 'NotExactError',
           'NotFoldedError', 'TokenScale', 'fold_rule', 'fuse_norms']
