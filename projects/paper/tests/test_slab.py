"""SLAB's files: random weights in its names give the outputs of its formulas."""
import pytest
import torch
from torch import nn

import projects.paper.paper  # noqa: F401  registers the layout
from mmunorm import fuse_norms
from mmunorm.checkpoints.loading import load_weights
from mmunorm.norms import RepBN
from mmunorm.utils import PreflightError
from tests.checkpoints.test_layouts import classifier, logits, official, timm_model


class SlabRepBN(nn.Module):
    """SLAB's: `BN(x) + alpha * x`."""

    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.randn(1))
        self.bn = nn.BatchNorm1d(channels)
        nn.init.normal_(self.bn.weight)
        nn.init.normal_(self.bn.bias)
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.2, 4)

    def forward(self, x):
        bn = self.bn
        return (x - bn.running_mean) / (bn.running_var + bn.eps).sqrt() * bn.weight + bn.bias + self.alpha * x


class SlabLinearNorm(nn.Module):
    """SLAB's PRepBN at inference, where LayerNorm has no part."""

    def __init__(self, channels):
        super().__init__()
        for name in ('warm', 'iter', 'total_step'):
            self.register_buffer(name, torch.tensor(0))
        self.norm1, self.norm2 = nn.LayerNorm(channels), SlabRepBN(channels)

    def forward(self, x):
        return self.norm2(x)


@pytest.mark.parametrize('norm', [SlabLinearNorm, SlabRepBN])
@pytest.mark.parametrize('kind', ['swin', 'vit'])
def test_slab_s_models_are_rep_bn_and_fold_to_nothing(kind, norm, tmp_path):
    source = timm_model(kind, norm)
    path = str(tmp_path / 'slab.pth')
    torch.save(dict(official(source.state_dict()), optimizer=dict(state={}), max_accuracy=81.4), path)
    model = classifier(kind, norm_cfg=dict(type='RepBN'))
    load_weights(model, path)
    images = torch.randn(3, 3, 32, 32)
    expected = source(images)
    assert expected.std(dim=0).min() > 0.1
    torch.testing.assert_close(logits(model, images), expected, rtol=1e-4, atol=1e-4)
    report = fuse_norms(model, strict=True)
    assert report.folded and not any(isinstance(module, RepBN) for module in model.modules())
    torch.testing.assert_close(logits(model, images), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('extra', [{'blocks.0.attn.dwc.weight': torch.zeros(1)}, {'patch_embed.proj.weight': None}])
def test_slab_s_other_models_are_refused(extra, tmp_path):
    weights = {**timm_model('vit', SlabLinearNorm).state_dict(), **extra}
    weights = {name: value for name, value in weights.items() if value is not None}
    torch.save(dict(model=weights), tmp_path / 'slab.pth')
    with pytest.raises(PreflightError, match="SLAB's PVT, CSWin and models with linear attention"):
        load_weights(classifier('vit', norm_cfg=dict(type='RepBN')), str(tmp_path / 'slab.pth'))


def test_a_config_with_layer_norm_says_what_to_do(tmp_path):
    torch.save(official(timm_model('vit', SlabLinearNorm).state_dict()), tmp_path / 'slab.pth')
    with pytest.raises(PreflightError, match='whose norms are RepBN: add --norm RepBN'):
        load_weights(classifier('vit', norm_cfg=dict(type='LN')), str(tmp_path / 'slab.pth'))
