"""The names in the Swin and DeiT that SLAB published: https://github.com/xinghaochen/SLAB (Guo et al., ICML 2024)."""
from __future__ import annotations

import re

from torch import Tensor, nn

from mmunorm.checkpoints.layouts import published_layout, weights_for
from mmunorm.utils import PreflightError

_NORM = re.compile(r'(.*?norm\d?)\.(?:norm2\.)?(?:bn\.(.*)|(alpha))')
# LayerNorm (`norm1`) and counters have a part in training alone.
_TRAINING = re.compile(r'.*norm\d?\.(norm1\.(weight|bias)|warm|iter|total_step)')


@published_layout
def from_slab(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor] | None:
    """SLAB's weights, whose norms become RepBN: `alpha` is its `eta`."""
    if not any(name.endswith('.alpha') and name.replace('.alpha', '.bn.running_var') in weights for name in weights):
        return None
    if 'patch_embed.proj.weight' not in weights or any('.attn.dwc.' in name for name in weights):
        raise PreflightError("SLAB's PVT, CSWin and models with linear attention (slab_*.pth) are not supported, only "
                             'its Swin and DeiT with PRepBN.')
    if not any(name.endswith('.eta') for name in model.state_dict()):
        raise PreflightError("the checkpoint is from SLAB, whose norms are RepBN: add --norm RepBN.")
    named = {}
    for name, value in weights.items():
        if not _TRAINING.fullmatch(name):
            norm = _NORM.fullmatch(name)
            named[f'{norm[1]}.{norm[2] or "eta"}' if norm else name] = value
    return weights_for(model, named)
