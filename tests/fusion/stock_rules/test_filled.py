"""Swins of torchvision and transformers lose every norm, their padding is filled; traces."""
import pytest
import torch
from torchvision.models import SwinTransformer

from mmunorm import fuse_norms, replace_norms

from .. import models


def images(*size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_torchvision():
    model = replace_norms(SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], num_classes=5), models.UN)
    sizes = [images(36, 52), images(32, 32), images(45, 70)]
    report = models.fold(model, *sizes, strict=True, example=sizes[0])
    assert len(report.folded) == 11 and sum('padding filled' in fold.where for fold in report.folded) == 4


@pytest.mark.parametrize('name, count', [('SwinForImageClassification', 11), ('DonutSwinModel', 10),
                                         ('MaskFormerSwinModel', 10)])
def test_transformers(name, count):
    transformers = pytest.importorskip('transformers')
    if name == 'MaskFormerSwinModel':
        from transformers.models.maskformer.modeling_maskformer_swin import MaskFormerSwinModel as cls
    else:
        cls = getattr(transformers, name)
    config = cls.config_class(image_size=36, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4)
    model = models.randomize(replace_norms(cls(config), models.UN).double())
    x, before = images(36, 36), []
    for _ in range(2):
        with torch.no_grad():
            output = model(x)
        before.append(output.logits if 'logits' in output else output.last_hidden_state)
        report = fuse_norms(model, example=x)
        assert len(report.folded) == count * (len(before) == 1)
    models.assert_equal(before[1:], before[:1])


@pytest.mark.parametrize('make, gamma, traced, sizes', [
    (models.one_stage_swin, 'none', (32, 32), [(40, 40)]),
    (models.one_stage_swin, 'some', (32, 32), [(40, 40), (48, 40), (40, 56)]),
    (models.one_stage_timm_swin, 'some', (32, 32), [(36, 36), (44, 60)]),
    (models.one_stage_timm_swin, 'some', (36, 44), [(32, 32), (44, 60)])])
@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning', 'ignore:.*torch.jit.trace.*')
def test_a_trace_is_right_at_other_sizes(make, gamma, traced, sizes):
    """Where the map of the trace has no padding, those of others have."""
    model = models.randomize(make().double(), gamma=gamma)
    fuse_norms(model, strict=True)
    trace = torch.jit.trace(model, images(*traced), check_trace=False)
    for size in sizes:
        models.assert_equal([trace(images(*size))], models.outputs(model, images(*size)))
