"""Small Vision Transformers with a residual scheme, and the same network written down once more in the tests."""
import math

import torch

from mmunorm.backbones import UNVisionTransformer
from mmunorm.residuals import RESIDUALS

SCHEMES = sorted(RESIDUALS.module_dict)
WITHOUT_NORM = ('ReZero', 'ScaledResidual', 'TFixup')
IMAGES = (2, 3, 16, 16)


def vit(residual='PreNorm', depth=2, norm='LN', **kwargs):
    """A ViT of width 8, two heads, 5 tokens of a 16 x 16 picture; `residual` is a type or a config."""
    residual_cfg = dict(type=residual) if isinstance(residual, str) else residual
    arch = dict(embed_dims=8, num_layers=depth, num_heads=2, feedforward_channels=12)
    norm_cfg = {} if residual_cfg['type'] in WITHOUT_NORM else dict(norm_cfg=dict(type=norm))
    return UNVisionTransformer(
        arch, **{**dict(img_size=16, patch_size=8, residual_cfg=residual_cfg), **norm_cfg, **kwargs})


def randomize(model, seed=0, std=0.25):
    """Draws all parameters, in float64."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
    return model


def layer_norm(norm, x):
    centered = x - x.mean(-1, keepdim=True)
    deviation = (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return norm.weight * centered / deviation + norm.bias


def linear(layer, x):
    return torch.einsum('oi,bli->blo', layer.weight, x) + layer.bias


def attention(attn, x, before_out=lambda x: x, head_scale=None):
    """Softmax attention with two heads of width 4."""
    q, k, v = (linear(attn.qkv, x)[..., 8 * i:8 * i + 8] for i in range(3))
    heads = []
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        scores = torch.einsum('bic,bjc->bij', q[..., part], k[..., part]) / 2
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.einsum('bij,bjc->bic', weights, v[..., part])
        heads.append(output if head_scale is None else head_scale[head] * output)
    proj = attn.proj if isinstance(attn.proj, torch.nn.Linear) else attn.proj.linear
    return linear(proj, before_out(torch.cat(heads, -1)))


def ffn(ffn, x, before_fc2=lambda x: x):
    hidden = linear(ffn.layers[0][0], x)
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    fc2 = ffn.layers[1]
    return linear(fc2 if isinstance(fc2, torch.nn.Linear) else fc2.linear, before_fc2(hidden))


def embed(model, images):
    patches = model.patch_embed(images)[0]
    return torch.cat([model.cls_token.expand(len(images), 1, 8), patches], 1) + model.pos_embed


def reference(model, scheme, images, branch_weight=1.):
    """What the class token becomes, by the formula of each scheme; `branch_weight` is BranchNorm's `a_t`."""
    x = embed(model, images)
    depth = len(model.layers)
    outputs = []  # DLCL's

    def mix(x, connection):
        outputs.append(layer_norm(connection.mix_norm, x))
        return sum(weight * output for weight, output in zip(connection.weight, outputs, strict=True))

    for layer in model.layers:
        x = mix(x, layer.residual1) if scheme == 'DLCL' else x
        for f, norm, connection in ((lambda x, i=layer, **k: attention(i.attn, x, **k), layer.ln1, layer.residual1),
                                    (lambda x, i=layer, **k: ffn(i.ffn, x, **k), layer.ln2, layer.residual2)):
            is_attention = connection is layer.residual1
            if scheme in ('PostNorm', 'DSInit'):
                x = layer_norm(norm, x + f(x))
            elif scheme == 'DeepNorm':
                x = layer_norm(norm, (2 * depth)**(1 / 4) * x + f(x))
            elif scheme == 'BranchNorm':
                x = layer_norm(norm, x + branch_weight * f(x))
            elif scheme == 'Admin':
                x = layer_norm(norm, connection.weight * x + f(x))
            elif scheme in ('PreNorm', 'DLCL'):
                x = x + f(layer_norm(norm, x))
            elif scheme == 'SubLN':
                inner = layer.attn.proj.norm if is_attention else layer.ffn.layers[1].norm
                key = 'before_out' if is_attention else 'before_fc2'
                x = x + f(layer_norm(norm, x), **{key: lambda y, n=inner: layer_norm(n, y)})
            elif scheme == 'NormFormer' and is_attention:
                y = f(layer_norm(norm, x), head_scale=layer.attn.proj.scale.weight)
                x = x + layer_norm(connection.norm, y)
            elif scheme == 'NormFormer':
                inner = layer.ffn.layers[1].norm
                x = x + f(layer_norm(norm, x), before_fc2=lambda y, n=inner: layer_norm(n, y))
            elif scheme == 'TFixup':
                x = x + f(x)
            elif scheme == 'ReZero':
                x = x + layer.residual1.gain * f(x)
            elif scheme == 'SkipInit':
                x = x + connection.gain * f(layer_norm(norm, x))
            elif scheme == 'LayerScale':
                x = x + connection.weight * f(layer_norm(norm, x))
            elif scheme == 'ResPostNorm':
                x = x + layer_norm(norm, f(x))
            elif scheme == 'PeriNorm':
                x = x + layer_norm(connection.norm, f(layer_norm(norm, x)))
            elif scheme == 'ScaledResidual':
                x = (x + f(x)) / math.sqrt(2)
            else:
                raise AssertionError(scheme)
    x = mix(x, model.layers[-1].residual2) if scheme == 'DLCL' else x
    return (layer_norm(model.ln1, x) if model.final_norm and scheme not in WITHOUT_NORM else x)[:, 0]
