"""Swin Transformer (arXiv 2103.14030) with one `norm_cfg` for all its norms.

One class serves classification and detection.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from math import isqrt

import torch.nn.functional as F
from mmengine.logging import print_log
from mmengine.registry import MODELS
from mmpretrain.models import SwinTransformer

from ..norms.base import DEFAULT_NORM_CFG, check_norm_cfg

# As in mmpretrain's Swin configs.
DEFAULT_INIT_CFG = dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.)


@MODELS.register_module()
class UNSwinTransformer(SwinTransformer):
    """mmpretrain's Swin Transformer with `norm_cfg` used in EVERY norm.

    The stock class passes its `norm_cfg` to the output norms alone. Here it also reaches the patch
    embedding, `norm1` and `norm2` of each block and the norm of each patch merging. Swin-T has 29 norms
    for classification (`out_indices=(3, )`) and 32 for detection (`out_indices=(0, 1, 2, 3)`).

    The names in `state_dict` are the stock ones and the same for both tasks. So a classifier's weights load into a
    detector's backbone with `init_cfg=dict(type='Pretrained', checkpoint=..., prefix='backbone.')`. Published
    mmpretrain Swin checkpoints load too, also old ones. If a checkpoint has another `window_size`, its relative
    position biases are resized by bicubic interpolation.

    Takes `(N, in_channels, H, W)` and returns a tuple with one `(N, C_i, H_i, W_i)` for each of `out_indices`.

    Args:
        arch (str | dict): 'tiny', 'small', 'base', 'large' or a dict of `embed_dims`, `depths` and
            `num_heads`. Defaults to 'tiny'.
        norm_cfg (dict): config of every norm. Defaults to `dict(type='UN')`.
        stage_cfgs (dict | Sequence[dict], optional): extra arguments of all stages, or of each stage. A
            `norm_cfg` in its `block_cfgs` or `downsample_cfg` wins over the argument above.
        patch_cfg (dict, optional): extra arguments of the patch embedding; its `norm_cfg` wins as well.
        frozen_stages (int): freezes the patch embedding, the stages up to this one, and the output norms of these
            stages. They get no gradient and stay in eval mode, so their statistics do not change. -1 freezes
            nothing. Defaults to -1.
        norm_eval (bool): keep every norm, of any type, in eval mode. Defaults to False.
        init_cfg (dict | list[dict], optional): initialization config. Defaults to a truncated normal with
            a deviation of 0.02 for every linear layer.
        **kwargs: the other arguments of :class:`mmpretrain.models.SwinTransformer`, with its defaults.
            Detectors need `pad_small_map=True`.

    Raises:
        TypeError: `norm_cfg` is not a dict with a `type`.
    """

    def __init__(self, arch: str | dict = 'tiny', *, norm_cfg: dict = DEFAULT_NORM_CFG,
                 stage_cfgs: dict | Sequence[dict] | None = None, patch_cfg: dict | None = None,
                 init_cfg: dict | list[dict] | None = DEFAULT_INIT_CFG, **kwargs):
        check_norm_cfg(norm_cfg)
        super().__init__(
            arch, norm_cfg=norm_cfg, stage_cfgs=_map_cfgs(lambda cfg: _stage_cfg(cfg, norm_cfg), stage_cfgs),
            patch_cfg={'norm_cfg': norm_cfg, **(patch_cfg or {})}, init_cfg=init_cfg, **kwargs)
        # Must be done before DDP wraps the model: DDP waits for the gradients of what requires one at that time.
        self._freeze_stages()

    def train(self, mode: bool = True) -> UNSwinTransformer:
        """Like the stock method, but `norm_eval` reaches norms of every type, and the module is returned."""
        super().train(mode)
        if self.norm_eval:
            for name, module in self.named_modules():
                if re.fullmatch(r'norm\d*', name.rpartition('.')[2]):
                    module.eval()
        return self

    def _freeze_stages(self) -> None:
        super()._freeze_stages()
        # The stock method stops the gradient of these norms, but leaves them in training mode.
        for i in self.out_indices:
            if i <= self.frozen_stages:
                getattr(self, f'norm{i}').eval()

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # Converts checkpoints of mmpretrain's Swin before version 3. The stock class does so for itself only.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if key.startswith(f'{prefix}norm.'):
                name = key.removeprefix(f'{prefix}norm.')
                state_dict[f'{prefix}norm{self.num_layers - 1}.{name}'] = state_dict.pop(key)
            elif key.endswith('.attn_mask'):
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _prepare_relative_position_bias_table(self, state_dict, prefix, *args, **kwargs):
        # Replaces the stock hook, which calls SciPy's `interp2d`. SciPy 1.14 has removed that function.
        for name, module in self.named_modules():
            key = f'{prefix}{name}.relative_position_bias_table'
            if key not in state_dict:
                continue
            table = state_dict[key]
            old_side, new_side = isqrt(len(table)), isqrt(len(module.relative_position_bias_table))
            if old_side == new_side:
                continue
            print_log(f'Resize {key} from {old_side} x {old_side} to {new_side} x {new_side}', 'current')
            grid = table.float().t().reshape(1, -1, old_side, old_side)
            grid = F.interpolate(grid, size=(new_side, new_side), mode='bicubic')
            state_dict[key] = grid.flatten(2)[0].t().to(table.dtype)
            # The checkpoint's index belongs to its own window size.
            state_dict[f'{prefix}{name}.relative_position_index'] = module.relative_position_index


def _map_cfgs(fill, cfgs: dict | Sequence[dict] | None) -> dict | list[dict]:
    """`fill` applied to one config, or to each of several."""
    if isinstance(cfgs, Sequence):
        return [fill(cfg) for cfg in cfgs]
    return fill(cfgs or {})


def _stage_cfg(stage_cfg: dict, norm_cfg: dict) -> dict:
    """The config of a stage, with `norm_cfg` wherever it names no norm."""
    return {**stage_cfg, **{part: _map_cfgs(lambda cfg: {'norm_cfg': norm_cfg, **cfg}, stage_cfg.get(part))
                            for part in ('block_cfgs', 'downsample_cfg')}}
