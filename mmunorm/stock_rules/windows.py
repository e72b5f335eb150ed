"""Window attention with neutral padding, after the norm before it is folded."""
from __future__ import annotations

from mmpretrain.models.utils import ShiftWindowMSA
from torch import Tensor

from ..fusion.padding import NeutralPadding


class FilledWindows(NeutralPadding):
    """For mmdet's and mmpretrain's: fills the map up by itself, so that the stock method finds nothing left to pad."""

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """As the stock method: `query` is `(B, H * W, C)`."""
        height, width = hw_shape
        window = (self.window_size, self.window_size)
        # mmpretrain refuses a map that is smaller than a window in classification: it must see the map.
        refused = not getattr(self, 'pad_small_map', True) and min(height, width) < self.window_size
        if refused or not self.must_fill(height, width, window):
            return super().forward(query, hw_shape)
        x = self.fill(query.unflatten(1, (height, width)), window)
        filled_shape = x.shape[1:3]
        x = super().forward(x.flatten(1, 2), filled_shape)
        return x.unflatten(1, filled_shape)[:, :height, :width].flatten(1, 2)


class FilledShiftWindowMSA(FilledWindows, ShiftWindowMSA):
    """mmpretrain's."""
