import torch

from mmunorm.checkpoints.folded import load_folded, save_folded
from mmunorm.checkpoints.loading import load_weights
from mmunorm.fusion import fuse_norms
from mmunorm.norms import replace_norms

from ..fusion import models


def test_the_tables_that_swin_v2_drops_from_every_file_are_not_missed(tmp_path):
    def make():
        backbone = dict(type='SwinTransformerV2', img_size=32, window_size=4, out_indices=(1, ),
                        arch=dict(embed_dims=8, depths=[1, 1], num_heads=[1, 2], extra_norm_every_n_blocks=0))
        return replace_norms(models.classifier(backbone, 16), dict(type='UN'))

    model, other, x = make().eval(), make().eval(), torch.randn(2, 3, 32, 32)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'a.pth')
    load_weights(other, str(tmp_path / 'a.pth'))
    assert torch.equal(model(x), other(x))
    fuse_norms(model)
    save_folded(model, tmp_path / 'folded.pth')
    torch.testing.assert_close(load_folded(tmp_path / 'folded.pth', make())(x), model(x))
