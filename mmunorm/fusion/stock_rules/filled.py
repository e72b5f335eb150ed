"""Window attention of other packages with neutral padding; none of them is imported before a model of it is folded."""
from __future__ import annotations

from functools import cache
from importlib import import_module

from torch import Tensor

from ..padding import NeutralPadding, filled
from ..rules import Fills, fold_rule


class _OpenMMLab(NeutralPadding):
    """mmdet's and mmpretrain's attention: the map is filled up, and the stock method finds nothing left to pad."""

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """As the stock method: `query` is `(B, H * W, C)`."""
        height, width = hw_shape
        window = (self.window_size, self.window_size)
        # mmpretrain refuses a map that is smaller than a window in classification: it must see the map.
        refused = not getattr(self, 'pad_small_map', True) and min(height, width) < self.window_size
        if refused or not self.must_fill(height, width, window):
            return super().forward(query, hw_shape)
        batch, _, channels = query.shape
        x = self.fill(query.view(batch, height, width, channels), window)
        _, filled_height, filled_width, _ = x.shape
        x = super().forward(x.flatten(1, 2), (filled_height, filled_width))
        x = x.view(batch, filled_height, filled_width, channels)  # `unflatten` would be constant in a trace
        return x[:, :height, :width].flatten(1, 2)


class _Timm(NeutralPadding):
    """timm's block, which rolls the map before it pads it."""

    def _init_buffers(self) -> None:
        # The stock method, for `set_input_size`, takes device and dtype from the norm.
        if not self.dynamic_mask:
            like = self.attn.qkv.weight
            self.attn_mask = self.get_attn_mask(device=like.device, dtype=like.dtype)

    def _attn(self, x: Tensor) -> Tensor:
        from timm.models.swin_transformer import window_partition, window_reverse
        _, height, width, _ = x.shape
        if not self.must_fill(height, width, self.window_size):
            return super()._attn(x)
        down, right = self.shift_size
        x = self.fill(x.roll((-down, -right), (1, 2)), self.window_size)
        _, filled_height, filled_width, _ = x.shape
        mask = self.get_attn_mask(x) if self.dynamic_mask else self.attn_mask
        windows = window_partition(x, self.window_size).flatten(1, 2)
        windows = self.attn(windows, mask=mask).unflatten(1, self.window_size)
        x = window_reverse(windows, self.window_size, filled_height, filled_width)
        return x[:, :height, :width].roll((down, right), (1, 2))


class _Torchvision(NeutralPadding):
    """torchvision's attention: the stock method finds nothing left to pad."""

    def forward(self, x: Tensor) -> Tensor:
        """`(B, H, W, C)`."""
        _, height, width, _ = x.shape
        if not self.must_fill(height, width, self.window_size):
            return super().forward(x)
        return super().forward(self.fill(x, self.window_size))[:, :height, :width]


class _Transformers(NeutralPadding):
    """A layer of transformers' Swins."""

    def maybe_pad(self, hidden_states: Tensor, height: int, width: int) -> tuple[Tensor, tuple[int, ...]]:
        """The map `(B, H, W, C)` filled up, and how much of it is padding, as the stock method returns it."""
        window = (self.window_size, self.window_size)
        if self.must_fill(height, width, window):
            hidden_states = self.fill(hidden_states, window)
        return hidden_states, (0, 0, 0, -width % self.window_size, 0, -height % self.window_size)


_FORWARD, _MASK = ('forward', 'window_partition', 'window_reverse'), 'get_attn_mask'
# By full name: what is mixed in, and the methods that have to be the stock ones.
_STOCK = {
    'mmdet.models.backbones.swin.ShiftWindowMSA': (_OpenMMLab, _FORWARD),
    'mmpretrain.models.utils.attention.ShiftWindowMSA': (_OpenMMLab, (*_FORWARD, _MASK)),
    'timm.models.swin_transformer.SwinTransformerBlock': (_Timm, ('forward', '_attn', _MASK)),
    'torchvision.models.swin_transformer.ShiftedWindowAttention': (_Torchvision, ('forward', )),
    **{f'transformers.models.{name}Layer': (_Transformers, ('forward', 'maybe_pad')) for name in (
        'swin.modeling_swin.Swin', 'donut.modeling_donut_swin.DonutSwin',
        'maskformer.modeling_maskformer_swin.MaskFormerSwin')}
}


@cache
def __getattr__(name: str) -> type[NeutralPadding]:
    """The class `Filled_PACKAGE_CLASS`, made when it is asked for, as by a pickle."""
    for path, (mixin, _) in _STOCK.items():
        module, _, cls = path.rpartition('.')
        if name == f'Filled_{path.partition(".")[0]}_{cls}':
            return type(name, (mixin, getattr(import_module(module), cls)), dict(__module__=__name__))
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def _fill_as(name: str):
    return lambda module, fill: filled(module, __getattr__(name), fill)


for _path, (_, _methods) in _STOCK.items():
    _fact = Fills(_fill_as(f'Filled_{_path.partition(".")[0]}_{_path.rpartition(".")[2]}'))
    fold_rule(_path, methods=_methods)(lambda module, fact=_fact: [fact])
