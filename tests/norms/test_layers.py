import timm
from mmengine.registry import MODELS
from torch import nn

from mmunorm.norms import UN, UN2d
from mmunorm.norms.layers import ONLINE_NORMS, is_channels_first, norm_layers


def test_norms_of_a_stock_model_in_order():
    model = timm.create_model('swin_tiny_patch4_window7_224', depths=(1, 1, 1, 1))
    found = dict(norm_layers(model))
    assert list(found)[:3] == ['patch_embed.norm', 'layers.0.blocks.0.norm1', 'layers.0.blocks.0.norm2']
    assert len(found) == 1 + 4 * 2 + 3 + 1


def test_a_norm_within_a_norm_counts_once():
    class Outer(UN):

        def __init__(self):
            super().__init__(4)
            self.inner = nn.LayerNorm(4)

    assert [name for name, _ in norm_layers(nn.Sequential(Outer(), nn.LayerNorm(4)))] == ['0', '1']


def test_a_layer_of_the_name_affine_makes_no_norm():
    from mmpretrain.models import RIFormer
    assert [type(norm).__name__ for _, norm in norm_layers(RIFormer('s12').network[0][0])] == ['GroupNorm'] * 2


def test_where_the_channels_are():
    for norm in (nn.BatchNorm2d(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), UN2d(4),
                 MODELS.build(dict(type='mmpretrain.LN2d', num_channels=4))):
        assert is_channels_first(norm)
    for norm in (*(cls(4) for cls in ONLINE_NORMS if cls is not nn.GroupNorm), UN(4)):
        assert not is_channels_first(norm)
