"""Errors of invalid combinations."""
import pytest

from mmunorm.norms import NoNorm
from mmunorm.utils import PreflightError
from projects.deep.deep import ResidualSwinTransformer, ResidualT2TViT, UNVisionTransformer
from projects.deep.deep.residuals import ResidualError
from projects.deep.deep.residuals.sublayer import describe

from .models import WITHOUT_NORM, vit

ARCH = dict(embed_dims=8, num_layers=2, num_heads=2, feedforward_channels=12)
BUILDERS = {
    'vit': lambda **cfg: UNVisionTransformer(ARCH, img_size=16, patch_size=8, **cfg),
    'swin': lambda **cfg: ResidualSwinTransformer(
        dict(embed_dims=8, depths=[1, 1], num_heads=[2, 2]), img_size=32, window_size=4, out_indices=(1, ), **cfg),
    't2t': lambda **cfg: ResidualT2TViT(32, embed_dims=12, num_layers=2, layer_cfgs=dict(num_heads=2), **cfg),
}


@pytest.mark.parametrize('scheme', WITHOUT_NORM)
@pytest.mark.parametrize('build', BUILDERS.values(), ids=BUILDERS)
def test_a_scheme_without_norms_refuses_norms(build, scheme):
    with pytest.raises(ResidualError, match=f'norm_cfg: {scheme} is a scheme without norms, and got UN'):
        build(residual_cfg=dict(type=scheme), norm_cfg=dict(type='UN'))
    for norm_cfg in ({}, dict(norm_cfg=dict(type='NoNorm'))):
        layer = next(module for module in build(residual_cfg=dict(type=scheme), **norm_cfg).modules()
                     if hasattr(module, 'residual1'))
        assert all(isinstance(getattr(layer, name), NoNorm) for name in layer.norm_names)


@pytest.mark.parametrize('backbone, cfg, message', [
    ('vit', dict(residual_cfg=None), 'residual_cfg=None: must be a dict that names its type'),
    ('swin', dict(residual_cfg='PostNorm'), "residual_cfg='PostNorm': must be a dict that names its type"),
    ('t2t', dict(residual_cfg=dict(warmup_iters=4)), 'residual_cfg=.*must be a dict that names its type'),
    ('vit', dict(residual_cfg=dict(type='MixNorm')), "no residual scheme 'MixNorm'; there are Admin, Branch.*TFixup"),
    ('vit', dict(residual_cfg=dict(type='BranchNorm', warmup_iters=-1)),
     'residual_cfg: BranchNorm: warmup_iters must be an int of at least 0, got -1'),
    ('vit', dict(residual_cfg=dict(type='BranchNorm', schedule='cubic')),
     "residual_cfg: .*schedule must be one of 'linear', 'exponential', 'sigmoid', got 'cubic'"),
    ('vit', dict(residual_cfg=dict(type='BranchNorm', steps=4)),
     'residual_cfg: BranchNorm has no argument steps; it has warmup_iters, schedule'),
    ('vit', dict(residual_cfg=dict(type='PostNorm', depth=4)), 'PostNorm has no argument depth; it has none'),
    ('vit', dict(residual_cfg=dict(type='LayerScale', init_value='1e-5')),
     "residual_cfg: LayerScale: init_value must be a number, .* got '1e-5'"),
    ('swin', dict(residual_cfg=dict(type='DLCL')), 'residual_cfg: DLCL: .* need one width, got 8 and 16 channels'),
    ('vit', dict(residual_cfg=dict(type='ReZero'), layer_cfgs=dict(norm_cfg=dict(type='LN'))),
     'ReZero is a scheme without norms, and got LayerNorm'),
    ('vit', dict(residual_cfg=dict(type='ResPostNorm'), norm_cfg=dict(type='NoNorm')),
     'ResPostNorm starts with a scale of 0 in each norm, and NoNorm has no'),
])
def test_refused(backbone, cfg, message):
    with pytest.raises(ResidualError, match=message):
        BUILDERS[backbone](**cfg)
    assert issubclass(ResidualError, PreflightError)  # the tools print it as one line


def test_a_scope_that_mmengine_writes_is_no_argument():
    vit(dict(type='BranchNorm', _scope_='mmunorm'))


def test_a_sublayer_that_is_not_known():
    with pytest.raises(TypeError, match='knows MultiheadAttention, .* got Dropout'):
        describe(vit().drop_after_pos)
