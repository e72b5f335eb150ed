"""Combinations that cannot be meant, and what the errors say."""
import pytest

from mmunorm.backbones import UNSwinTransformer, UNT2TViT, UNVisionTransformer
from mmunorm.norms import NoNorm
from mmunorm.residuals import ResidualError
from mmunorm.residuals.sublayer import describe
from mmunorm.utils import PreflightError

from .models import WITHOUT_NORM, vit

ARCH = dict(embed_dims=8, num_layers=2, num_heads=2, feedforward_channels=12)
BUILDERS = {
    'vit': lambda **cfg: UNVisionTransformer(ARCH, img_size=16, patch_size=8, **cfg),
    'swin': lambda **cfg: UNSwinTransformer(
        dict(embed_dims=8, depths=[1, 1], num_heads=[2, 2]), img_size=32, window_size=4, out_indices=(1, ), **cfg),
    't2t': lambda **cfg: UNT2TViT(32, embed_dims=12, num_layers=2, layer_cfgs=dict(num_heads=2), **cfg),
}
every_backbone = pytest.mark.parametrize('build', BUILDERS.values(), ids=BUILDERS)


@pytest.mark.parametrize('scheme', WITHOUT_NORM)
@every_backbone
def test_a_scheme_without_norms_refuses_norms(build, scheme):
    with pytest.raises(ValueError, match=f'norm_cfg: {scheme} is a scheme without norms, and got UN'):
        build(residual_cfg=dict(type=scheme), norm_cfg=dict(type='UN'))
    for norm_cfg in ({}, dict(norm_cfg=dict(type='NoNorm'))):
        layer = next(module for module in build(residual_cfg=dict(type=scheme), **norm_cfg).modules()
                     if hasattr(module, 'residual1'))
        assert all(isinstance(getattr(layer, name), NoNorm) for name in layer.norm_names)


def test_a_norm_of_a_part_is_refused_too():
    with pytest.raises(ValueError, match='ReZero is a scheme without norms, and got LayerNorm'):
        vit('ReZero', layer_cfgs=dict(norm_cfg=dict(type='LN')))


@pytest.mark.parametrize('residual_cfg', [None, 'PostNorm', dict(warmup_iters=4)])
@every_backbone
def test_bad_residual_cfg_is_named(build, residual_cfg):
    with pytest.raises(ResidualError, match='residual_cfg=.*must be a dict that names its type'):
        build(residual_cfg=residual_cfg)


def test_an_unknown_scheme_is_answered_with_those_that_there_are():
    with pytest.raises(ValueError, match="no residual scheme 'MixNorm'; there are Admin, BranchNorm, .*TFixup"):
        vit('MixNorm')


@pytest.mark.parametrize('argument, message', [
    (dict(warmup_iters=-1), 'warmup_iters must be an int of at least 0, got -1'),
    (dict(warmup_iters=0.5), 'warmup_iters must be an int'),
    (dict(schedule='cubic'), "schedule must be one of 'linear', 'exponential', 'sigmoid', got 'cubic'"),
    (dict(steps=4), 'BranchNorm has no argument steps; it has warmup_iters, schedule')])
def test_bad_arguments_of_branch_norm(argument, message):
    with pytest.raises(ResidualError, match=f'residual_cfg: .*{message}'):
        vit(dict(type='BranchNorm', **argument))


def test_bad_arguments_of_other_schemes():
    with pytest.raises(ResidualError, match='residual_cfg: PostNorm has no argument warmup_iters; it has none'):
        vit(dict(type='PostNorm', warmup_iters=4))
    with pytest.raises(ResidualError, match="residual_cfg: LayerScale: init_value must be a number, .* got '1e-5'"):
        vit(dict(type='LayerScale', init_value='1e-5'))


def test_the_tools_print_a_refusal_as_one_line():
    assert issubclass(ResidualError, PreflightError)


def test_a_scope_that_mmengine_writes_is_no_argument():
    vit(dict(type='BranchNorm', _scope_='mmunorm'))


def test_layers_of_several_widths_cannot_be_mixed():
    with pytest.raises(ResidualError, match='residual_cfg: DLCL: .* need one width, got 8 and 16 channels'):
        BUILDERS['swin'](residual_cfg=dict(type='DLCL'))


def test_res_post_norm_needs_a_scale():
    with pytest.raises(ValueError, match='ResPostNorm starts with a scale of 0 in each norm, and NoNorm has no'):
        vit('ResPostNorm', norm='NoNorm')


def test_a_sublayer_that_is_not_known():
    with pytest.raises(TypeError, match='knows MultiheadAttention, .* got Dropout'):
        describe(vit().drop_after_pos)
