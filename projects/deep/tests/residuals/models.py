"""Small Vision Transformers with a residual scheme, and independent implementations of their networks."""
import math
from functools import partial

import torch

from projects.deep.deep import UNVisionTransformer
from projects.deep.deep.residuals import RESIDUALS

SCHEMES = sorted(RESIDUALS.module_dict)
WITHOUT_NORM = ('RFixup', 'ReZero', 'ScaledResidual', 'TFixup')
IMAGES = (2, 3, 16, 16)


def vit(residual='PreNorm', depth=2, norm='LN', counted=True, **kwargs):
    """A ViT of width 8, two heads, 5 tokens of a 16 x 16 image; `residual` is a type or a config.

    With `counted`, BranchNorm does not warn that nobody counts.
    """
    residual_cfg = dict(type=residual) if isinstance(residual, str) else residual
    arch = dict(embed_dims=8, num_layers=depth, num_heads=2, feedforward_channels=12)
    norm_cfg = {} if residual_cfg['type'] in WITHOUT_NORM else dict(norm_cfg=dict(type=norm))
    model = UNVisionTransformer(
        arch, **{**dict(img_size=16, patch_size=8, residual_cfg=residual_cfg), **norm_cfg, **kwargs})
    if counted and hasattr(model, 'update_clock'):
        model.update_clock.is_counted = True
    return model


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
    """The class token by the formula of each scheme; `branch_weight` is BranchNorm's `a_t`."""
    x = embed(model, images)
    outputs = []  # DLCL's

    def mix(x, connection):
        outputs.append(layer_norm(connection.mix_norm, x))
        return sum(weight * output for weight, output in zip(connection.weight, outputs, strict=True))

    def after(x, f, part, norm, connection, first):
        """The stream after one sublayer `f(part, .)`."""
        plain, norm = partial(f, part), partial(layer_norm, norm)
        extra_norm = partial(layer_norm, connection.norm)
        last = part.proj if f is attention else part.layers[1]

        def with_inner_norm(x):
            return f(part, x, **{'before_out' if f is attention else 'before_fc2': partial(layer_norm, last.norm)})

        if scheme == 'NormFormer' and f is attention:
            return x + extra_norm(attention(part, norm(x), head_scale=last.scale.weight))
        return {
            **dict.fromkeys(('PostNorm', 'DSInit'), lambda: norm(x + plain(x))),
            'DeepNorm': lambda: norm((2 * len(model.layers))**(1 / 4) * x + plain(x)),
            'BranchNorm': lambda: norm(x + branch_weight * plain(x)),
            'Admin': lambda: norm(connection.weight * x + plain(x)),
            **dict.fromkeys(('PreNorm', 'DLCL'), lambda: x + plain(norm(x))),
            **dict.fromkeys(('SubLN', 'NormFormer'), lambda: x + with_inner_norm(norm(x))),
            'TFixup': lambda: x + plain(x),
            'RFixup': lambda: x + connection.gain * plain(x),
            'ReZero': lambda: x + first.gain * plain(x),
            'SkipInit': lambda: x + connection.gain * plain(norm(x)),
            'LayerScale': lambda: x + connection.weight * plain(norm(x)),
            'ResPostNorm': lambda: x + norm(plain(x)),
            'PeriNorm': lambda: x + extra_norm(plain(norm(x))),
            'ScaledResidual': lambda: (x + plain(x)) / math.sqrt(2),
        }[scheme]()

    for layer in model.layers:
        x = mix(x, layer.residual1) if scheme == 'DLCL' else x
        x = after(x, attention, layer.attn, layer.ln1, layer.residual1, layer.residual1)
        x = after(x, ffn, layer.ffn, layer.ln2, layer.residual2, layer.residual1)
    x = mix(x, model.layers[-1].residual2) if scheme == 'DLCL' else x
    return (layer_norm(model.ln1, x) if model.final_norm and scheme not in WITHOUT_NORM else x)[:, 0]
