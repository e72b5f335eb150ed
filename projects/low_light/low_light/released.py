"""The names in the weights that IAT's authors released: https://github.com/cuiziteng/Illumination-Adaptive-Transformer."""
from __future__ import annotations

from torch import Tensor, nn

from mmunorm.checkpoints.layouts import published_layout, rename

_PREFIXES = (
    ('local_net.conv1.', 'local_branch.stem.'), ('local_net.mul_end.0.', 'local_branch.mul.'),
    ('local_net.add_end.0.', 'local_branch.add.'), ('local_net.', 'local_branch.'),
    ('global_net.conv_large.proj.0.', 'global_branch.conv1.'), ('global_net.conv_large.proj.1.', 'global_branch.bn1.'),
    ('global_net.conv_large.proj.3.', 'global_branch.conv2.'), ('global_net.conv_large.proj.4.', 'global_branch.bn2.'),
    ('global_net.gamma_linear.', 'global_branch.gamma.'), ('global_net.color_linear.', 'global_branch.colour.'),
    ('global_net.color_base', 'global_branch.colour_base'), ('global_net.generator.', 'global_branch.'),
    ('global_net.', 'global_branch.'))
_PARTS = (
    ('.pos_embed.', '.position.'), ('.mlp.', '.'), ('.gamma_1', '.scale1.weight'), ('.gamma_2', '.scale2.weight'),
    ('.alpha', '.weight'), ('.beta', '.bias'), ('.color', '.matrix'),
    # The local "attention" is a depthwise convolution, the global one has queries.
    ('.attn.weight', '.depthwise.weight'), ('.attn.bias', '.depthwise.bias'), ('.attn.q', '.attn.queries'))
_WITH_SIDES_OF_1 = ('.alpha', '.beta', '.gamma_1', '.gamma_2', '.attn.q')
_QUERIES = 'global_branch.attn.queries'


@published_layout
def from_released_iat(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor] | None:
    """The authors' weights for a model with an IAT, such as `best_Epoch_lol_v1.pth`."""
    if 'global_net.generator.attn.q' not in weights:
        return None
    prefix = next((name.removesuffix(_QUERIES) for name in model.state_dict() if name.endswith(_QUERIES)), None)
    if prefix is None:
        return None
    flat = {name: value.squeeze() if name.endswith(_WITH_SIDES_OF_1) else value for name, value in weights.items()}
    return {prefix + name: value for name, value in rename(flat, _PREFIXES, _PARTS).items()}
