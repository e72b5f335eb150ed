"""Residual schemes: how a sublayer's output joins the stream, and with which weights it starts."""
from .admin import Admin, profile_admin
from .base import RESIDUALS, Place, Residual, ResidualError
from .branch_norm import BranchNorm
from .clock import UpdateClock, count_updates, growth
from .connect import (
    DEFAULT_NORM_CFG,
    DEFAULT_RESIDUAL_CFG,
    ResidualLayer,
    connect,
    initialize,
    norm_of,
    scheme_of,
)
from .deep_norm import DeepNorm
from .dlcl import DLCL
from .ds_init import DSInit
from .layer_scale import LayerScale
from .norm_former import HeadScale, NormFormer
from .peri_norm import PeriNorm
from .post_norm import PostNorm
from .pre_norm import PreNorm
from .re_zero import ReZero
from .res_post_norm import ResPostNorm
from .scaled_residual import ScaledResidual
from .skip_init import SkipInit
from .sub_ln import SubLN
from .t_fixup import TFixup

__all__ = [
    'DEFAULT_NORM_CFG', 'DEFAULT_RESIDUAL_CFG', 'DLCL', 'RESIDUALS', 'Admin', 'BranchNorm', 'DSInit', 'DeepNorm',
    'HeadScale', 'LayerScale', 'NormFormer', 'PeriNorm', 'Place', 'PostNorm', 'PreNorm', 'ReZero', 'ResPostNorm',
    'Residual', 'ResidualError', 'ResidualLayer', 'ScaledResidual', 'SkipInit', 'SubLN', 'TFixup', 'UpdateClock',
    'connect', 'count_updates', 'growth', 'initialize', 'norm_of', 'profile_admin', 'scheme_of'
]
