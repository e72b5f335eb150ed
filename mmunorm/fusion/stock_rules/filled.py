"""Window attention of other packages with neutral padding; none of them is imported before a model of it is folded."""
from __future__ import annotations

from functools import cache

from torch import Tensor, nn

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


@cache
def _filled_class(mixin: type[NeutralPadding], cls: type[nn.Module]) -> type[nn.Module]:
    reduce = lambda self: (_new, (mixin, cls), vars(self))  # noqa: E731  a pickle cannot import the class
    return type(f'Filled_{cls.__name__}', (mixin, cls), dict(__reduce__=reduce))


def _new(mixin: type[NeutralPadding], cls: type[nn.Module]) -> nn.Module:
    made = _filled_class(mixin, cls)
    return made.__new__(made)


def _add_rule(mixin: type[NeutralPadding], *names: str, methods: tuple[str, ...]) -> None:
    """Lets instances of these classes fill their padding with `mixin`, if `methods` are the stock ones."""
    fold_rule(*names, methods=methods)(lambda module: [
        Fills(lambda module, fill: filled(module, _filled_class(mixin, type(module)), fill))])


_METHODS = ('forward', 'window_partition', 'window_reverse')
_add_rule(_OpenMMLab, 'mmdet.models.backbones.swin.ShiftWindowMSA', methods=_METHODS)
_add_rule(_OpenMMLab, 'mmpretrain.models.utils.attention.ShiftWindowMSA', methods=(*_METHODS, 'get_attn_mask'))
_add_rule(_Timm, 'timm.models.swin_transformer.SwinTransformerBlock', methods=('forward', '_attn', 'get_attn_mask'))
_add_rule(_Torchvision, 'torchvision.models.swin_transformer.ShiftedWindowAttention', methods=('forward', ))
_add_rule(_Transformers, *(f'transformers.models.{name}Layer' for name in (
    'swin.modeling_swin.Swin', 'donut.modeling_donut_swin.DonutSwin',
    'maskformer.modeling_maskformer_swin.MaskFormerSwin')), methods=('forward', 'maybe_pad'))
