"""IAT, an image enhancer with 91 K parameters that adapts illumination for downstream tasks (arXiv 2205.14871)."""
from __future__ import annotations

import math

import torch
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule, normal_init, trunc_normal_init
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmunorm.compat import is_compiling
from mmunorm.norms import Norm
from mmunorm.norms.base import check_norm_cfg

LOCAL_CHANNELS = 16
GLOBAL_CHANNELS = 64
HEADS = 4
QUERIES = 10  # gamma, and the nine numbers of the colour matrix
DROP_PATHS = (0.01, 0.05, 0.1)  # of the blocks of a stack
MIN_VALUE = 1e-8  # a power of 0 has no gradient
TOLERANCE = 1e-3  # by which values may exceed [0, 1], for rounding and interpolation


class LightNorm2d(nn.Module):
    """The paper's light norm of `(N, C, H, W)`: a matrix over channels, then a scale and a shift. No statistics."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features
        self.matrix = nn.Parameter(torch.eye(num_features))
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        kernel = (self.weight[:, None] * self.matrix)[..., None, None]
        return nn.functional.conv2d(x, kernel, self.bias)

    def affine(self) -> tuple[Tensor, Tensor]:
        """`scale` `(C, C)` and `shift` `(C,)` of `y = scale @ x + shift`, float64."""
        return self.weight.detach().double()[:, None] * self.matrix.detach().double(), self.bias.detach().double()


class ChannelScale2d(nn.Module):
    """A learned factor for each channel of `(N, C, H, W)`, which folds into the convolution before it."""

    def __init__(self, num_features: int, start: float):
        super().__init__()
        self.num_features = num_features
        self.weight = nn.Parameter(torch.full((num_features, ), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, None, None]

    def affine(self) -> tuple[Tensor, Tensor]:
        """`scale` and `shift` of `y = scale * x + shift`: two `(C,)` float64 tensors."""
        scale = self.weight.detach().double()
        return scale, torch.zeros_like(scale)


class LocalBlock(nn.Module):
    """A block of the local branch: positions, depthwise attention, MLP; each added to its input."""

    def __init__(self, channels: int, drop_path: float):
        super().__init__()
        self.position = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm1 = LightNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 1)
        self.depthwise = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.conv2 = nn.Conv2d(channels, channels, 1)
        self.scale1 = ChannelScale2d(channels, 1e-4)
        self.norm2 = LightNorm2d(channels)
        self.fc1 = nn.Conv2d(channels, 4 * channels, 1)
        self.fc2 = nn.Conv2d(4 * channels, channels, 1)
        self.scale2 = ChannelScale2d(channels, 1e-4)
        self.act = nn.GELU()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """`(N, C, H, W)` to the same shape; `valid` as :func:`zero_padding` takes it."""
        x = x + self.position(zero_padding(x, valid))
        update = self.depthwise(zero_padding(self.conv1(self.norm1(x)), valid))
        x = x + self.drop_path(self.scale1(self.conv2(update)))
        return x + self.drop_path(self.scale2(self.fc2(self.act(self.fc1(self.norm2(x))))))


class LocalBranch(nn.Module):
    """The local branch, which predicts a factor and an offset for each pixel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, LOCAL_CHANNELS, 3, padding=1)
        self.act = nn.LeakyReLU(0.2)
        self.mul_blocks, self.add_blocks = (
            nn.ModuleList(LocalBlock(LOCAL_CHANNELS, rate) for rate in DROP_PATHS) for _ in range(2))
        self.mul = nn.Conv2d(LOCAL_CHANNELS, 3, 3, padding=1)
        self.add = nn.Conv2d(LOCAL_CHANNELS, 3, 3, padding=1)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`(N, 3, H, W)` to two maps of the same shape: at least 0, and in [-1, 1]."""
        x = self.act(self.stem(zero_padding(x, valid)))
        maps = []
        for blocks, last in ((self.mul_blocks, self.mul), (self.add_blocks, self.add)):
            y = x
            for block in blocks:
                y = block(y, valid)
            maps.append(last(zero_padding(y + x, valid)))
        return maps[0].relu(), maps[1].tanh()


class QueryAttention(nn.Module):
    """Attention of learned queries to tokens `(N, L, C)`."""

    def __init__(self, channels: int):
        super().__init__()
        self.queries = nn.Parameter(torch.ones(QUERIES, channels))
        self.k = nn.Linear(channels, channels, bias=False)
        self.v = nn.Linear(channels, channels, bias=False)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> Tensor:
        """`(N, L, C)` to `(N, 10, C)`; `is_padding` `(N, L)` bool, True for tokens to ignore."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in (self.queries, self.k(x), self.v(x)))
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
        if is_padding is not None:
            scores = torch.where(is_padding[:, None, None], -math.inf, scores)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class GlobalBranch(nn.Module):
    """The gamma and the colour matrix of an image. Arguments as for :class:`IAT`."""

    def __init__(self, norm_cfg: dict, learn_gamma_base: bool):
        super().__init__()
        channels = GLOBAL_CHANNELS
        self.conv1 = nn.Conv2d(3, channels // 2, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(channels // 2)
        self.conv2 = nn.Conv2d(channels // 2, channels, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.position = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm1 = build_norm_layer(norm_cfg, channels)[1]
        self.attn = QueryAttention(channels)
        self.norm2 = build_norm_layer(norm_cfg, channels)[1]
        self.fc1 = nn.Linear(channels, 4 * channels)
        self.fc2 = nn.Linear(4 * channels, channels)
        self.act = nn.GELU()
        self.gamma = nn.Linear(channels, 1)
        self.gamma_base = nn.Parameter(torch.ones(1), requires_grad=learn_gamma_base)
        self.colour = nn.Linear(channels, 1)
        self.colour_base = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`(N, 3, H, W)` to gamma `(N,)` and the colour matrix `(N, 3, 3)`; `sizes` as :class:`IAT` takes it."""
        x = self.act(self.bn1(self.conv1(zero_padding(x, valid_mask(x, sizes)))))
        sizes = strided_sizes(sizes)
        x = self.bn2(self.conv2(zero_padding(x, valid_mask(x, sizes))))
        valid = valid_mask(x, strided_sizes(sizes))
        tokens = (x + self.position(zero_padding(x, valid))).flatten(2).transpose(1, 2)
        is_padding = None if valid is None else ~valid.flatten(1)
        masks = (is_padding, ) if isinstance(self.norm1, Norm) else ()
        x = self.attn(self.norm1(tokens, *masks), is_padding)
        x = x + self.fc2(self.act(self.fc1(self.norm2(x))))
        gamma = self.gamma(x[:, 0])[:, 0] + self.gamma_base
        return gamma, self.colour(x[:, 1:]).unflatten(1, (3, 3))[..., 0] + self.colour_base


def strided_sizes(sizes: Tensor | None) -> Tensor | None:
    """The sizes after a convolution of stride 2."""
    return None if sizes is None else torch.div(sizes + 1, 2, rounding_mode='floor')


def valid_mask(x: Tensor, sizes: Tensor | None) -> Tensor | None:
    """The mask of the images of `sizes` in a batch `(N, C, H, W)`, `(N, 1, H, W)` bool; None without sizes."""
    if sizes is None:
        return None
    rows = torch.arange(x.shape[2], device=x.device)[:, None] < sizes[:, 0, None, None]
    columns = torch.arange(x.shape[3], device=x.device) < sizes[:, 1, None, None]
    return (rows & columns)[:, None]


def zero_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """`x` with zeros outside its images, like the padding of a convolution; `valid` is from :func:`valid_mask`."""
    return x if valid is None else torch.where(valid, x, 0.)


@MODELS.register_module()
class IAT(BaseModule):
    """Illumination Adaptive Transformer (arXiv 2205.14871): `(M (x * mul + add)) ** gamma`.

    The local branch predicts `mul` and `add` for each pixel, the global one the colour matrix M and gamma for each
    image. With LayerNorm it has 91,154 parameters. If the norms of `norm_cfg` fold, `mmunorm.fuse_norms` folds all
    norms, including the light norms and BatchNorms.

    Args:
        norm_cfg (dict): config of the two norms of the global branch. Defaults to `dict(type='UN')`.
        learn_gamma_base (bool): whether the number added to the predicted gamma, 1 at first, is trained: True for
            low light, False for exposure correction. Defaults to True.
        init_cfg (dict, optional): pretrained weights, such as `dict(type='Pretrained', checkpoint=PATH,
            prefix='backbone.')` of a trained :class:`ImageEnhancer`. Defaults to None.

    Raises:
        TypeError: `norm_cfg` is not a dict with a `type`.
    """

    def __init__(self, norm_cfg: dict | None = None, learn_gamma_base: bool = True, init_cfg: dict | None = None):
        super().__init__(init_cfg)
        self.local_branch = LocalBranch()
        norm_cfg = dict(type='UN') if norm_cfg is None else check_norm_cfg(norm_cfg)
        self.global_branch = GlobalBranch(norm_cfg, learn_gamma_base)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_init(module, std=0.02)
            elif isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                normal_init(module, std=math.sqrt(2 / fan_out))
        nn.init.zeros_(self.global_branch.attn.v.weight)

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Enhances images of any size.

        Args:
            x: RGB `(N, 3, H, W)` in [0, 1], floating.
            sizes: height and width of each image, `(N, 2)`, if images are smaller than `x`, at its upper left.
                Each is enhanced independently; outputs outside of it are undefined. In training, BatchNorm's
                statistics include the padding. Defaults to None.

        Returns:
            RGB of the same shape in [0, 1]; float32, or the dtype of `x` if the parameters have it too.

        Raises:
            ValueError: `x` has another shape, is empty, or has values outside [0, 1]. Compiled and exported graphs do
                not check values.
            TypeError: `x` is not floating.
        """
        self._check_input(x)
        mul, add = self.local_branch(x, valid_mask(x, sizes))
        gamma, matrix = self.global_branch(x, sizes)
        # bfloat16 has a lower resolution than an 8-bit image.
        with torch.autocast(x.device.type, enabled=False):
            if x.dtype == torch.float32:
                mul, add, gamma, matrix = (value.float() for value in (mul, add, gamma, matrix))
            y = (matrix @ (x * mul + add).flatten(2)).unflatten(2, x.shape[2:])
            return y.clamp(MIN_VALUE, 1.) ** gamma[:, None, None, None]

    def light(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gamma `(N,)` and the colour matrix `(N, 3, 3)` of images as :meth:`forward` takes them."""
        self._check_input(x)
        return self.global_branch(x)

    @staticmethod
    def _check_input(x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != 3 or 0 in x.shape:
            raise ValueError(f'IAT: x must be RGB images (N, 3, H, W) with a pixel at least, got shape '
                             f'{tuple(x.shape)}')
        if not x.is_floating_point():
            raise TypeError(f'IAT: x must be floating RGB in [0, 1], got {x.dtype}: divide by its largest value, 255 '
                            'for 8 bits')
        if is_compiling():
            return
        low, high = (value.item() for value in x.detach().aminmax())
        if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
            raise ValueError(f'IAT: x must be RGB in [0, 1], got values from {low:g} to {high:g}: divide images of 0 '
                             'to 255 by 255, and do not normalize them')
