"""timm's Swin block with neutral padding; imported only when a model holds one."""
from timm.models.swin_transformer import SwinTransformerBlock, window_partition, window_reverse
from torch import Tensor

from ..fusion.padding import NeutralPadding


class FilledSwinTransformerBlock(NeutralPadding, SwinTransformerBlock):
    """timm's block, which rolls the map before it pads it."""

    def _init_buffers(self) -> None:
        # The stock method, for `set_input_size`, takes device and dtype from the norm.
        if not self.dynamic_mask:
            like = self.attn.qkv.weight
            self.attn_mask = self.get_attn_mask(device=like.device, dtype=like.dtype)

    def _attn(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        if not self.must_fill(height, width, self.window_size):
            return super()._attn(x)
        down, right = self.shift_size
        x = self.fill(x.roll((-down, -right), (1, 2)), self.window_size)
        filled_height, filled_width = x.shape[1:3]
        mask = self.get_attn_mask(x) if self.dynamic_mask else self.attn_mask
        windows = window_partition(x, self.window_size).flatten(1, 2)
        windows = self.attn(windows, mask=mask).unflatten(1, self.window_size)
        x = window_reverse(windows, self.window_size, filled_height, filled_width)
        return x[:, :height, :width].roll((down, right), (1, 2))
