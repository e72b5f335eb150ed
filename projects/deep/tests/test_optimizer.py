import pytest

from tests.engine.test_optimizer import settings_by_name

from .residuals.models import vit


@pytest.mark.parametrize('scheme', ['LayerScale', 'NormFormer', 'DLCL'])
def test_factors_of_residual_connections_have_no_weight_decay(scheme):
    settings = settings_by_name(vit(scheme, norm='UN'), dict(norm_decay_mult=0.))
    factors = [name for name in settings if 'residual' in name or '.scale.' in name]
    assert factors and {settings[name] for name in factors} == {(0.1, 0.)}
    assert settings['layers.0.attn.qkv.weight'] == (0.1, 0.05)
