"""The initial weights of each scheme, by roles."""
import math

import pytest
import torch
from torch import nn

from projects.deep.deep import ResidualSwinTransformer, ResidualT2TViT, UNVisionTransformer
from projects.deep.deep.residuals import profile_admin

from .models import IMAGES, embed, vit

QK, REST = ('q', 'k'), ('v', 'out', 'fc1', 'fc2')
WIDE = dict(embed_dims=96, num_heads=2, feedforward_channels=192)


def by_role(layer):
    """The weights of an encoder layer, by role."""
    attn = getattr(layer.attn, 'w_msa', layer.attn)
    out, fc2 = (part if isinstance(part, nn.Linear) else part.linear for part in (attn.proj, layer.ffn.layers[1]))
    qkv = attn.qkv.weight
    c = qkv.shape[1]
    return dict(q=qkv[:c], k=qkv[c:2 * c], v=qkv[2 * c:], out=out.weight, fc1=layer.ffn.layers[0][0].weight,
                fc2=fc2.weight)


def gain(weight):
    """The deviation of a weight over Xavier's."""
    return (weight.std() / (2 / sum(weight.shape))**0.5).item()


def expected_gain(scheme, role, layer, depth):
    if scheme == 'DSInit':
        return layer**-0.5
    if scheme == 'RFixup':
        return {'out': 0, 'fc1': (2 * depth)**(-1 / 2), 'fc2': 0}.get(role, (2 * depth)**(-1 / 6))
    if scheme in ('PostNorm', 'Admin') or role in QK:
        return 1
    return {'DeepNorm': (8 * depth)**(-1 / 4), 'BranchNorm': (8 * depth)**(-1 / 4),
            'SubLN': math.sqrt(math.log(2 * depth)), 'TFixup': 0.67 * depth**(-1 / 4)}[scheme]


@pytest.mark.parametrize('scheme', ['PostNorm', 'DeepNorm', 'BranchNorm', 'SubLN', 'Admin', 'DSInit', 'TFixup',
                                    'RFixup'])
def test_weights_by_role_vit(scheme):
    depth = 5
    model = UNVisionTransformer(
        dict(num_layers=depth, **WIDE), img_size=16, patch_size=8, residual_cfg=dict(type=scheme),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02, bias=1.))
    if scheme != 'DeepNorm':  # PreNorm has these weights anyway
        model.init_weights()
    for number, layer in enumerate(model.layers, start=1):
        for role, weight in by_role(layer).items():
            expected = expected_gain(scheme, role, number, depth)
            assert gain(weight) == pytest.approx(expected, rel=0.05), (number, role)
        assert not layer.attn.qkv.bias.any()
    if scheme == 'TFixup':
        assert gain(model.patch_embed.projection.weight.flatten(1)) == pytest.approx((9 * depth)**-0.25, rel=0.05)


@pytest.mark.parametrize('scheme', ['PreNorm', 'SkipInit', 'ReZero', 'LayerScale', 'ResPostNorm', 'PeriNorm',
                                    'NormFormer', 'ScaledResidual', 'DLCL'])
def test_other_schemes_start_as_init_cfg_says(scheme):
    model = ResidualT2TViT(
        32, embed_dims=96, num_layers=2, layer_cfgs=dict(num_heads=2), residual_cfg=dict(type=scheme))
    model.init_weights()
    for layer in model.encoder:
        for weight in by_role(layer).values():
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_weights_by_role_swin_and_t2t_go_by_the_depth_of_the_whole_model():
    swin = ResidualSwinTransformer(
        dict(embed_dims=48, depths=[1, 2], num_heads=[2, 4]), img_size=32, window_size=4, out_indices=(1, ),
        residual_cfg=dict(type='DeepNorm'))
    t2t = ResidualT2TViT(
        32, embed_dims=96, num_layers=3, layer_cfgs=dict(num_heads=2), residual_cfg=dict(type='DeepNorm'))
    for model in (swin, t2t):
        model.init_weights()
    blocks = [block for stage in swin.stages for block in stage.blocks]
    for layer in (*blocks, *t2t.encoder):
        assert layer.residual1.scales()[0] == pytest.approx(6**0.25)
        for role, weight in by_role(layer).items():
            assert gain(weight) == pytest.approx(1 if role in QK else 24**-0.25, rel=0.1), role


@pytest.mark.parametrize('depth, value', [(18, 0.1), (19, 1e-5), (25, 1e-6)])
def test_layer_scale_starts_by_the_depth(depth, value):
    model = vit('LayerScale', depth)
    assert all(torch.equal(weight, torch.full((8, ), value)) for name, weight in model.named_parameters()
               if 'residual' in name)
    assert vit(dict(type='LayerScale', init_value=0.5)).layers[0].residual1.weight.eq(0.5).all()


def test_a_checkpoint_overrides_the_initialization(tmp_path):
    source = vit('DeepNorm')
    torch.save(dict(state_dict=source.state_dict()), tmp_path / 'deep.pth')
    model = vit('DeepNorm', init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'deep.pth')))
    model.init_weights()
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize('norm', ['LN', 'UN'])
def test_admin_weighs_the_stream_by_the_variances_before(norm):
    model = vit('Admin', 3, norm).train()
    nn.init.normal_(model.cls_token)
    images = torch.randn(IMAGES)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    profile_admin(model, lambda: model(images))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]) or 'residual' in name, name

    weights = [connection.weight for layer in model.layers for connection in (layer.residual1, layer.residual2)]
    with torch.no_grad():
        x, total, expected = embed(model, images), 0., []
        for layer in model.layers:
            for part, ln in ((layer.attn, layer.ln1), (layer.ffn, layer.ln2)):
                y = part(x)
                expected.append(total**0.5 if expected else 1.)
                total += y.var(correction=0).item()
                x = ln(x + y)
    assert len(weights) == 6
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, torch.full((8, ), value))


def test_admin_is_profiled_before_the_length_of_a_run_is_known():
    """A warm-up that is a share of the run: the batch is as one of the warm-up, and the norms are as they were."""
    torch.manual_seed(0)
    model, share = (vit('Admin', 2, norm_cfg=dict(type='UN', warmup_iters=warmup)).train() for warmup in (9, 0.1))
    share.load_state_dict(model.state_dict())
    images = torch.randn(IMAGES)
    for net in (model, share):
        profile_admin(net, lambda net=net: net(images))
    torch.testing.assert_close(share.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match='a share of a run whose length is unknown'):
        share(images)


def test_admin_errors():
    for model, message in ((vit('PostNorm'), 'model: UNVisionTransformer has no Admin'),
                           (vit('Admin').eval(), 'call model.train'),
                           (vit('Admin').train(), 'run: must run each of the 4 Admin connections once, and ran 0')):
        with pytest.raises(ValueError, match=message):
            profile_admin(model, lambda: None)
