"""Residual schemes: how the output of a sublayer is added to the stream, and its initial weights."""
from .admin import Admin, profile_admin
from .base import RESIDUALS, Residual, ResidualError, StackPosition
from .clock import UpdateClock, branch_weight, count_updates
from .connect import DEFAULT_NORM_CFG, DEFAULT_RESIDUAL_CFG, ResidualLayer, connect, initialize, norm_of, scheme_of
from .post_norm import BranchNorm, DeepNorm, DSInit, PostNorm
from .pre_norm import DLCL, HeadScale, LayerScale, NormFormer, PeriNorm, PreNorm, ResPostNorm, SkipInit, SubLN
from .without_norm import ReZero, RFixup, ScaledResidual, TFixup

__all__ = [
    'DEFAULT_NORM_CFG', 'DEFAULT_RESIDUAL_CFG', 'DLCL', 'RESIDUALS', 'Admin', 'BranchNorm', 'DSInit', 'DeepNorm',
    'HeadScale', 'LayerScale', 'NormFormer', 'PeriNorm', 'PostNorm', 'PreNorm', 'RFixup', 'ReZero', 'ResPostNorm',
    'Residual', 'ResidualError', 'ResidualLayer', 'ScaledResidual', 'SkipInit', 'StackPosition', 'SubLN', 'TFixup',
    'UpdateClock', 'connect', 'count_updates', 'branch_weight', 'initialize', 'norm_of', 'profile_admin', 'scheme_of'
]
