"""Checkpoints as other projects publish them: random weights in their names give the outputs of their formulas."""
import re

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from mmunorm.checkpoints.layouts import find_weights
from mmunorm.checkpoints.loading import load_weights
from mmunorm.utils import PreflightError

from ..fusion import models

VIT = dict(embed_dim=16, depth=2, num_heads=2, patch_size=8, mlp_ratio=1.5)
TIMM = {
    'swin': ('swin_tiny_patch4_window7_224', dict(embed_dim=8, depths=(2, 2), num_heads=(2, 4), window_size=4)),
    'vit': ('deit_tiny_patch16_224', VIT),
    'deit': ('deit_tiny_distilled_patch16_224', VIT),
}
OURS = dict(swin=models.swin_classifier, vit=models.vit_classifier, deit=models.deit_classifier,
            t2t=models.t2t_classifier)


def classifier(kind, *args, **kwargs):
    """A small classifier of ours in eval mode."""
    return OURS[kind](*args, **kwargs).eval()


def logits(model, images):
    return model(images, mode='tensor')


def timm_model(kind, norm=None, **sizes):
    """A small model of timm's with random weights, and `norm` in place of its LayerNorms."""
    name, small = TIMM[kind]
    model = timm.create_model(name, **(sizes or dict(img_size=32, num_classes=5, **small)))
    for path, module in list(model.named_modules()):
        if norm is not None and isinstance(module, nn.LayerNorm):
            parent, _, child = path.rpartition('.')
            setattr(model.get_submodule(parent), child, norm(module.normalized_shape[0]))
    for parameter in model.parameters():
        if parameter.dim() > 1 or norm is None:  # else the norm has drawn its own
            nn.init.normal_(parameter, std=(parameter[0].numel() if parameter.dim() > 1 else len(parameter))**-0.5)
    return model.eval()


def official(weights):
    """timm's Swin in the names of the official one, whose merging comes after a stage; DeiT keeps its names."""
    weights = {re.sub(r'^layers\.(\d)\.downsample', lambda match: f'layers.{int(match[1]) - 1}.downsample',
                      name).replace('head.fc.', 'head.'): value for name, value in weights.items()}
    if 'layers.0.blocks.0.attn.qkv.weight' in weights:
        weights.update({'layers.0.blocks.1.attn_mask': torch.zeros(4, 16, 16),
                        'layers.0.blocks.0.attn.relative_position_index': torch.zeros(16, 16, dtype=torch.long)})
    return dict(model=weights)


@pytest.mark.parametrize('kind, form', [*((kind, dict) for kind in TIMM), ('swin', official)])
def test_timm_and_the_official_swin(kind, form, tmp_path):
    source, path = timm_model(kind), str(tmp_path / 'public.pth')
    torch.save(form(source.state_dict()), path)
    model = classifier(kind, dict(type='LN', eps=1e-5 if kind == 'swin' else 1e-6))
    load_weights(model, path)
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(logits(model, images), source(images), rtol=1e-4, atol=1e-4)


class Tokens(nn.Module):
    """A layer of the official T2T-ViT's token module, with softmax or as a Performer."""

    def __init__(self, inputs, performer, width=8):
        super().__init__()
        self.norm1, self.norm2, self.performer = nn.LayerNorm(inputs), nn.LayerNorm(width), performer
        qkv, proj = nn.Linear(inputs, 3 * width, bias=performer), nn.Linear(width, width)
        if performer:
            self.kqv, self.proj, self.w = qkv, proj, nn.Parameter(torch.randn(4, width))
            self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        else:
            self.attn, self.mlp = nn.ModuleDict(dict(qkv=qkv, proj=proj)), timm.layers.Mlp(width)

    def features(self, x):
        return (x @ self.w.t() - x.square().sum(-1, keepdim=True) / 2).exp() / len(self.w)**0.5

    def forward(self, x):
        y = self.norm1(x)
        if self.performer:
            k, q, v = self.kqv(y).chunk(3, dim=-1)
            products = self.features(q) @ self.features(k).mT
            y = v + self.proj(products @ v / (products.sum(-1, keepdim=True) + 1e-8))
        else:
            q, k, v = self.attn.qkv(y).chunk(3, dim=-1)
            y = v + self.attn.proj((q @ k.mT * x.shape[-1]**-0.5).softmax(-1) @ v)
        return y + self.mlp(self.norm2(y))


class T2T(nn.Module):
    """The official T2T-ViT: `(N, 3, 32, 32)` to `(N, 5)`."""

    def __init__(self, performer):
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16))
        self.tokens_to_token = nn.ModuleDict(dict(
            attention1=Tokens(147, performer), attention2=Tokens(72, performer), project=nn.Linear(72, 16)))
        self.blocks = nn.Sequential(*(timm.models.vision_transformer.Block(16, 2, 1.5) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        x = F.unfold(x, 7, stride=4, padding=2).mT
        for layer in (self.tokens_to_token.attention1, self.tokens_to_token.attention2):
            x = layer(x).mT
            x = F.unfold(x.unflatten(2, (round(x.shape[2]**0.5), -1)), 3, stride=2, padding=1).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.tokens_to_token.project(x)], dim=1)
        return self.head(self.norm(self.blocks(x + self.pos_embed))[:, 0])


@pytest.mark.parametrize('performer', [True, False])
def test_the_official_t2t_vit(performer, tmp_path):
    source, worse = (models.randomize(T2T(performer), seed) for seed in (0, 1))
    torch.save(dict(state_dict_ema=source.state_dict(), state_dict=worse.state_dict(), epoch=310),
               tmp_path / 't2t.pth.tar')
    model = classifier('t2t', models.LN, dict(use_performer=performer))
    load_weights(model, str(tmp_path / 't2t.pth.tar'))
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(logits(model, images), source(images), rtol=1e-4, atol=1e-4)


def mmcv_1(weights):
    """With the meta data, the optimizer's state and mmcv's averages of a file of mmcls or mmdet 2."""
    copies = {f'ema_{name.replace(".", "_")}': value + 1 for name, value in weights.items()}
    return dict(meta=dict(CLASSES=('a', 'b'), mmcls_version='0.25.0'), state_dict={**weights, **copies},
                optimizer=dict(state={0: dict(step=1)}, param_groups=[]))


def mmengine(weights):
    others = {f'module.{name}': value + 1 for name, value in weights.items()}
    return dict(meta=dict(epoch=300), state_dict=weights, ema_state_dict=others, optimizer={}, message_hub={},
                param_schedulers=[])


def data_parallel(weights):
    return dict(state_dict={f'module.{name}': value for name, value in weights.items()})


def compiled(weights):
    return dict(state_dict={f'module._orig_mod.{name}': value for name, value in weights.items()})


def compiled_in_part(weights):
    return {f'_orig_mod.module.{name.replace("layers.", "layers._orig_mod.")}': value
            for name, value in weights.items()}


@pytest.mark.parametrize('form', [dict, mmcv_1, mmengine, data_parallel, compiled, compiled_in_part, 'safetensors'])
def test_files_of_openmmlab_and_safetensors(form, tmp_path):
    source, model = (classifier('vit', models.LN) for _ in range(2))
    weights, meta = source.state_dict(), {}
    path = tmp_path / ('a.safetensors' if form == 'safetensors' else 'a.pth')
    if form == 'safetensors':
        save_file(weights, path)
    else:
        content = form(weights)
        torch.save(content, path)
        meta = content.get('meta', {})
    assert load_weights(model, str(path)) == meta
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(PreflightError, match=f'cannot read the checkpoint .*{path.name}'):
        load_weights(model, str(path))


@pytest.mark.parametrize('name, value, said', [
    ('backbone.ln1.weight', torch.nan, 'NaN'), ('backbone.ln1.weight', -torch.inf, 'infinite values'),
    ('backbone.ln1.running_var', torch.inf, 'infinite values')])
def test_values_that_are_not_finite_are_refused(name, value, said, tmp_path):
    model = classifier('vit')
    weights = model.state_dict()
    weights['backbone.ln1.psi'][0] = torch.inf  # of a training alone
    torch.save(dict(state_dict=weights), tmp_path / 'a.pth')
    load_weights(model, str(tmp_path / 'a.pth'))
    weights[name][0] = value
    torch.save(dict(state_dict=weights), tmp_path / 'a.pth')
    with pytest.raises(PreflightError, match=f'a.pth has {said}.* in {name}: its training has diverged'):
        load_weights(model, str(tmp_path / 'a.pth'))


def test_of_several_weights_one_rule_decides(tmp_path):
    first, second, third = (dict(weight=torch.full((1, ), float(i))) for i in range(3))
    config = dict(weight='no tensor')
    for content, expected in (
            (dict(state_dict=first, model=second), 1), (dict(state_dict=first, state_dict_ema=second), 1),
            (dict(state_dict_ema=first, model=second, state_dict=third), 1),
            (dict(state_dict=third, model=config, epoch=4), 2), (dict(model=third, config=config), 2)):
        assert find_weights(content)['weight'].item() == expected
    for content in (dict(weight=torch.ones(1)), {3: torch.ones(1)}, dict(epoch=3)):  # without a place of their own
        assert find_weights(content) == content
