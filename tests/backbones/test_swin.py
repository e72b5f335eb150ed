import pytest
import torch
from mmpretrain.models import SwinTransformer
from torch import nn
from torch.nn import functional as F

from mmunorm.backbones import UNSwinTransformer
from mmunorm.norms import UN

from .models import assert_equals_stock, count, randomize

ARCH = dict(embed_dims=8, depths=[2, 1, 2, 1], num_heads=[1, 2, 2, 4])
SMALL = dict(
    arch=ARCH, img_size=32, patch_size=2, window_size=4, drop_path_rate=0., pad_small_map=True)
ALL_STAGES = (0, 1, 2, 3)
NORMS_OF_BLOCKS = 2 * sum(ARCH['depths'])
NO_WARMUP = dict(type='UN', window=2, warmup_iters=0)
IMAGES = (2, 3, 32, 32)


def train_step(model, images):
    outputs = model.train()(images)
    sum(output.float().square().mean() for output in outputs).backward()
    return outputs


@pytest.mark.parametrize('arguments, norm_type, number', [
    (dict(), UN, 29), (dict(out_indices=ALL_STAGES, norm_cfg=dict(type='LN')), nn.LayerNorm, 32)])
def test_every_norm_of_swin_tiny_has_the_type(arguments, norm_type, number):
    model = UNSwinTransformer('tiny', **arguments)
    assert count(model, norm_type) == count(model, (UN, nn.LayerNorm)) == number


def test_the_norm_of_a_part_overrides():
    ln = dict(norm_cfg=dict(type='LN'))
    stages = [dict(block_cfgs=[ln, dict(ffn_ratio=2.)]), dict(downsample_cfg=ln), {}, dict(block_cfgs=ln)]
    model = UNSwinTransformer(**SMALL, patch_cfg=ln, stage_cfgs=stages)
    layer_norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    assert layer_norms == ['patch_embed.norm', 'stages.0.blocks.0.norm1', 'stages.0.blocks.0.norm2',
                           'stages.1.downsample.norm', 'stages.3.blocks.0.norm1', 'stages.3.blocks.0.norm2']
    assert count(model, UN) == 1 + NORMS_OF_BLOCKS + 3 + 1 - len(layer_norms)
    assert model.stages[0].blocks[1].ffn.feedforward_channels == 16


@pytest.mark.parametrize('training, out_indices, size', [(False, (3, ), (32, 32)), (True, ALL_STAGES, (37, 51))])
def test_with_ln_equals_the_stock_class(training, out_indices, size):
    stock = SwinTransformer(**SMALL, out_indices=out_indices)
    ours = UNSwinTransformer(**SMALL, out_indices=out_indices, norm_cfg=dict(type='LN'))
    assert_equals_stock(ours, stock, size, training)


def test_checkpoint_of_an_old_stock_version_loads():
    stock = randomize(SwinTransformer(**SMALL))
    old = {f'backbone.{name.replace("norm3.", "norm.")}': value for name, value in stock.state_dict().items()}
    assert sum('norm.weight' in name and 'stages' not in name for name in old) == 2  # patch_embed, output
    old['backbone.stages.0.blocks.1.attn.attn_mask'] = torch.zeros(4, 16, 16)
    ours = UNSwinTransformer(**SMALL, norm_cfg=dict(type='LN'))
    nn.ModuleDict({'backbone': ours}).load_state_dict(old, strict=True)
    images = torch.randn(IMAGES)
    stock.eval()
    assert torch.equal(ours.eval()(images)[0], stock(images)[0])


@pytest.mark.parametrize('window_size', [3, 8])
def test_checkpoint_of_another_window_size_loads(window_size):
    source = randomize(SwinTransformer(**SMALL))
    ours = UNSwinTransformer(**{**SMALL, 'window_size': window_size}, norm_cfg=dict(type='LN'))
    index = ours.stages[0].blocks[0].attn.w_msa.relative_position_index.clone()
    nn.ModuleDict({'backbone': ours}).load_state_dict(
        nn.ModuleDict({'backbone': source}).state_dict(), strict=True)

    old, new = 2 * 4 - 1, 2 * window_size - 1
    for stage, heads in enumerate(ARCH['num_heads']):
        table = source.stages[stage].blocks[0].attn.w_msa.relative_position_bias_table
        resized = ours.stages[stage].blocks[0].attn.w_msa.relative_position_bias_table
        grid = F.interpolate(table.view(1, old, old, heads).movedim(-1, 1), size=(new, new), mode='bicubic')
        torch.testing.assert_close(resized, grid.movedim(1, -1).reshape(new * new, heads))
    assert torch.equal(ours.stages[0].blocks[0].attn.w_msa.relative_position_index, index)
    assert ours.eval()(torch.randn(IMAGES))[0].shape == (2, 64, 2, 2)


def test_norm_eval_reaches_norms_of_every_type():
    """The stock class knows BatchNorm alone."""
    model = UNSwinTransformer(**SMALL, out_indices=ALL_STAGES, norm_eval=True).train()
    norms = [module for module in model.modules() if isinstance(module, UN)]
    assert len(norms) == 1 + NORMS_OF_BLOCKS + 3 + 4
    assert not any(norm.training for norm in norms)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.stages[0].blocks[0].training


def test_frozen_stages_do_not_change():
    model = UNSwinTransformer(**SMALL, out_indices=ALL_STAGES, frozen_stages=1)

    def is_frozen(name):
        return name.startswith(('patch_embed.', 'stages.0.', 'stages.1.', 'norm0.', 'norm1.'))

    # From the start, because DDP reads requires_grad before the first call of train().
    assert all(parameter.requires_grad != is_frozen(name) for name, parameter in model.named_parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        train_step(model, torch.randn(IMAGES))
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == is_frozen(name), name
    for name, value in model.state_dict().items():
        if name.endswith(('running_var', 'num_batches_tracked')):
            assert torch.equal(value, before[name]) == is_frozen(name), name
    for name, module in model.named_modules():
        if isinstance(module, UN):
            assert module.training != is_frozen(f'{name}.'), name


@pytest.mark.parametrize('size', [(33, 47), (5, 90)])
def test_odd_sizes_have_one_map_per_level(size):
    model = UNSwinTransformer(**SMALL, out_indices=ALL_STAGES)
    height, width = size
    for stage, output in enumerate(train_step(model, torch.randn(2, 3, height, width))):
        stride = 2**(stage + 1)
        # Every level rounds up, and so does the whole.
        assert output.shape == (2, 8 * 2**stage, -(-height // stride), -(-width // stride))
        assert output.is_contiguous()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
