import copy

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn

from mmunorm import fuse_norms
from mmunorm.norms.layers import is_norm
from projects.low_light.low_light import IAT
from projects.low_light.low_light.iat import LightNorm2d


def trained(norm='UN', dtype=torch.float64):
    """An IAT with random weights and statistics."""
    model = IAT(dict(type=norm))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith('running_var'):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
            elif name.endswith('running_mean'):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model.to(dtype).eval()


def images(*shape, dtype=torch.float64):
    return torch.rand(*shape).to(dtype)


def test_parameters():
    model = MODELS.build(dict(type='IAT', norm_cfg=dict(type='LN')))
    count = [sum(parameter.numel() for parameter in part.parameters())
             for part in (model.local_branch, model.global_branch, model)]
    assert count == [24_454, 66_700, 91_154]
    assert [type(norm) for norm in (model.global_branch.norm1, model.global_branch.norm2)] == [nn.LayerNorm] * 2


def test_it_starts_as_the_paper_says():
    model = IAT()
    branch = model.global_branch
    assert (branch.attn.queries == 1).all() and (branch.attn.v.weight == 0).all()
    block = model.local_branch.mul_blocks[0]
    assert (block.scale1.weight == 1e-4).all() and torch.equal(block.norm1.matrix, torch.eye(16))
    assert [block.drop_path.drop_prob for block in model.local_branch.add_blocks] == [0.01, 0.05, 0.1]
    assert branch.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert branch.conv2.weight.std().item() == pytest.approx((2 / (9 * 64))**0.5, rel=0.05)
    assert block.fc1.weight.std().item() == pytest.approx((2 / 64)**0.5, rel=0.2)
    assert all((parameter == 0).all() for name, parameter in model.named_parameters()
               if name.endswith('bias') and 'norm' not in name and 'bn' not in name)
    gamma, matrix = model.eval().light(images(2, 3, 9, 9, dtype=torch.float32))
    # v returns zeros, so the outputs are those of the MLP of zero.
    torch.testing.assert_close(gamma, torch.ones(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(matrix, torch.eye(3).expand(2, 3, 3), atol=1e-6, rtol=0)


def test_the_formula():
    model, x = trained(), images(2, 3, 11, 17)
    mul, add = model.local_branch(x)
    gamma, matrix = model.light(x)
    pixel = matrix[1] @ (x[1, :, 4, 6] * mul[1, :, 4, 6] + add[1, :, 4, 6])
    torch.testing.assert_close(model(x)[1, :, 4, 6], pixel.clamp(1e-8, 1)**gamma[1])
    assert (mul >= 0).all() and (add.abs() < 1).all() and not torch.equal(gamma[0], gamma[1])


@pytest.mark.parametrize('base', [True, False])
def test_the_base_of_gamma_is_trained_in_low_light_only(base):
    model = IAT(learn_gamma_base=base)
    model(images(2, 3, 8, 8, dtype=torch.float32)).sum().backward()
    assert (model.global_branch.gamma_base.grad is not None) == base


@pytest.mark.parametrize('norm, reduced', [('UN', []), ('LN', ['global_branch.norm1', 'global_branch.norm2'])])
def test_all_that_can_fold_folds_exactly(norm, reduced):
    model = trained(norm)
    folded = copy.deepcopy(model)
    report = fuse_norms(folded)
    assert [fold.norm for fold in report.reduced] == reduced and not report.kept
    assert not any(is_norm(module) for module in folded.modules())
    assert sum(fold.kind == 'LightNorm2d' for fold in report.folded) == 12
    for size in ((37, 51), (1, 1), (2, 5)):
        x = images(2, 3, *size)
        torch.testing.assert_close(folded(x), model(x), atol=1e-12, rtol=1e-12)
    assert model(images(1, 3, 16, 16)).std() > 0.01


def test_a_norm_that_mixes_channels_does_not_go_into_a_grouped_convolution():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = LightNorm2d(4), nn.Conv2d(4, 4, 1, groups=4)

        def forward(self, x):
            return self.conv(self.norm(x))

    report = fuse_norms(Grouped().eval(), example=images(1, 4, 3, 3).float())
    assert 'mixes channels' in report.kept[0].where


@pytest.mark.parametrize('size', [(20, 33), (1, 1), (37, 2), (21, 51)])
def test_an_image_in_a_larger_batch_is_enhanced_as_alone(size):
    model, x = trained(), images(2, 3, 37, 51)
    height, width = size
    together = model(x, torch.tensor([[37, 51], size]))
    torch.testing.assert_close(together[:1], model(x[:1]), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(together[1:, :, :height, :width], model(x[1:, :, :height, :width]), atol=1e-12,
                               rtol=1e-12)


def test_padding_is_in_no_statistic_of_un():
    model = trained().train()
    x = images(1, 3, 16, 16)
    masks = []
    model.global_branch.norm1.register_forward_pre_hook(lambda norm, args: masks.append(args[1]))
    model(nn.functional.pad(x, (0, 8, 0, 4)), torch.tensor([[16, 16]]))
    assert masks[0].shape == (1, 30) and (~masks[0]).sum() == 16


def test_dtypes():
    model, x = IAT().eval(), images(1, 3, 9, 7, dtype=torch.float32)
    expected = model(x)
    with torch.autocast('cpu', torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.float32
    assert (y - expected).abs().mean() < 0.01
    y = model.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).abs().mean() < 0.02


@pytest.mark.parametrize('x, error, text', [
    (torch.rand(1, 3, 4, 4) * 255, ValueError, r'in \[0, 1\], got values from .* to 255 by 255'),
    (torch.randn(1, 3, 4, 4), ValueError, 'do not normalize'),
    (torch.full((1, 3, 4, 4), float('nan')), ValueError, 'got values from nan to nan'),
    (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), TypeError, 'got torch.uint8'),
    (torch.rand(3, 4, 4), ValueError, r'got shape \(3, 4, 4\)'),
    (torch.rand(1, 3, 0, 4), ValueError, 'with a pixel'),
])
def test_wrong_input(x, error, text):
    with pytest.raises(error, match=text):
        IAT().eval()(x)
