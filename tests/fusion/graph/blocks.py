"""Small blocks of which some fold and some do not, as people write them; all take and give tokens `(B, N, 8)`."""
import torch
import torch.nn.functional as F
from torch import nn

from mmunorm.norms import UN, UN2d

DIM = 8


class PreNorm(nn.Module):
    """Norm, MLP, sum."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = UN(DIM), nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x):
        return x + self.fc2(self.fc1(self.norm(x)).relu())


class ResPostNorm(PreNorm):
    """The norm is the last of the branch."""

    def forward(self, x):
        return x + self.norm(self.fc2(self.fc1(x).relu()))


class PostNorm(PreNorm):
    """The norm stands behind the sum: it stays."""

    def forward(self, x):
        return self.norm(x + self.fc2(self.fc1(x).relu()))


class Attention(nn.Module):
    """With norms of queries and keys, over each head."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = UN(DIM), nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = UN(DIM // 2), UN(DIM // 2)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, DIM // 2)).permute(2, 0, 3, 1, 4)
        x_new = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return x + self.proj(x_new.transpose(1, 2).flatten(2))


class SharedQKNorm(Attention):
    """One norm reads queries and keys."""

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, DIM // 2)).permute(2, 0, 3, 1, 4)
        x_new = F.scaled_dot_product_attention(self.q_norm(q), self.q_norm(k), v)
        return x + self.proj(x_new.transpose(1, 2).flatten(2))


class SplitBias(nn.Module):
    """BEiT's: the bias of the layer is put together from parts, of which one is a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = UN(DIM), nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM)
        self.q_bias = nn.Parameter(torch.randn(DIM))
        self.register_buffer('k_bias', torch.zeros(DIM), persistent=False)

    def forward(self, x):
        bias = torch.cat([self.q_bias, self.k_bias])
        return x + self.proj(F.linear(self.norm(x), self.qkv.weight, bias).tanh())


class OwnAttention(nn.Module):
    """torch's."""

    def __init__(self, bias=True):
        super().__init__()
        self.norm, self.attn = UN(DIM), nn.MultiheadAttention(DIM, 2, bias=bias, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attn(y, y, y, need_weights=False)[0]


class PartsOfAWeight(OwnAttention):
    """mmcv's: queries, keys and values are other tensors, and torch cuts the weight in three."""

    def forward(self, x):
        y = self.norm(x)
        return x + self.attn(y.clone(), y.clone(), y.clone())[0]


class OverlappingParts(nn.Module):
    """Two layers that share rows of one weight."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = UN(DIM), nn.Linear(DIM, 3 * DIM)

    def forward(self, x):
        y, (weight, bias) = self.norm(x), (self.fc.weight, self.fc.bias)
        one = F.linear(y, weight[:2 * DIM], bias[:2 * DIM])
        return one[..., :DIM] + F.linear(x, weight[DIM:2 * DIM], bias[DIM:2 * DIM])


class PartReadElsewhere(nn.Module):
    """Something else reads some rows of the weight."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = UN(DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x):
        one, two = self.fc.weight.chunk(2)
        return F.linear(self.norm(x), one, self.fc.bias[:DIM]) + two.mean()


class PositionsBehindNorm(OwnAttention):
    """DETR's: queries and keys get positions. The norm stays."""

    def forward(self, x):
        y = self.norm(x)
        positions = torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[:, None].expand(x.shape[1], DIM)
        return x + self.attn(y + positions, y + positions, y)[0]


class Windows(nn.Module):
    """A roll and windows of 4 tokens, padded where they do not fit: then the norm stays."""

    def __init__(self, padded=False):
        super().__init__()
        self.norm, self.fc = UN(DIM), nn.Linear(DIM, DIM)
        self.padded = padded

    def forward(self, x):
        tokens = x.shape[1]
        y = self.norm(x).roll(1, 1)
        if self.padded and tokens % 4:
            y = F.pad(y, (0, 0, 0, -tokens % 4))
        if y.shape[1] % 4 == 0:
            y = y.unflatten(1, (-1, 4)).transpose(1, 2)
            y = self.fc(y).transpose(1, 2).flatten(1, 2)[:, :tokens]
        else:
            y = self.fc(y)
        return x + y.roll(-1, 1)


class ClassToken(nn.Module):
    """A class token beside the tokens, in front of the norm or behind it."""

    def __init__(self, behind=False):
        super().__init__()
        self.norm, self.q, self.kv = UN(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM, bias=False)
        self.token = nn.Parameter(torch.randn(1, 1, DIM))
        self.behind = behind

    def forward(self, x):
        token = self.token.expand(len(x), -1, -1)
        y = torch.cat([token, self.norm(x)], 1) if self.behind else self.norm(torch.cat([token, x], 1))
        k, v = self.kv(y).chunk(2, -1)
        return x + F.scaled_dot_product_attention(self.q(y[:, :1]), k, v)


class Merging(nn.Module):
    """Patch merging: norms of two neighbours side by side; with `mixed` one of them without a norm."""

    def __init__(self, mixed=False):
        super().__init__()
        self.norm, self.fc = UN(DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.mixed = mixed

    def forward(self, x):
        y = self.norm(x)
        return x + self.fc(torch.cat([y.roll(1, 1), x if self.mixed else y], -1))


class Maps(nn.Module):
    """ConvNeXt's: a depthwise convolution, a norm over its map, and a convolution, padded or not."""

    def __init__(self, kernel=1, groups=1):
        super().__init__()
        self.conv1 = nn.Conv2d(DIM, DIM, 3, padding=1, groups=DIM)
        self.norm, self.conv2 = UN2d(DIM), nn.Conv2d(DIM, DIM, kernel, padding=kernel // 2, groups=groups)
        self.mix = nn.Conv2d(DIM, DIM, 1)

    def forward(self, x):
        y = x.transpose(1, 2).unsqueeze(-1)
        return x + self.mix(self.conv2(self.norm(self.conv1(y).relu())).relu()).squeeze(-1).transpose(1, 2)


class InPlace(nn.Module):
    """`x` changes before the output of the norm is read."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = UN(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x * 1
        y = self.norm(x)
        x += self.fc1(y).relu()
        x += self.fc2(y)
        return x


class Relu(PreNorm):
    """Something that is not linear reads the norm, in place."""

    def forward(self, x):
        return x + self.fc2(self.fc1(F.relu_(self.norm(x))))


class OtherRead(PreNorm):
    """The input of the layer behind the norm is read twice."""

    def forward(self, x):
        y = self.norm(x)
        return y + self.fc2(self.fc1(y).relu())


class TwoReaders(nn.Module):
    """A layer reads the norm, and in another place something else."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = UN(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.fc(x) + self.fc(self.norm(x))


class WeightRead(PreNorm):
    """The weight of the layer is read elsewhere."""

    def forward(self, x):
        return super().forward(x) + self.fc1.weight.mean()


class Gathered(PreNorm):
    """Some tokens, by index and by mask."""

    def forward(self, x):
        y = self.norm(x)
        y = y[:, torch.arange(x.shape[1]).flip(0)]
        y = torch.stack([y[:, 0], y[:, -1]], 1).mean(1, keepdim=True)
        return x + self.fc2(self.fc1(y).relu())


class Mixer(nn.Module):
    """A layer over 6, 7 or 8 tokens, not over channels: the norm stays."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = UN(DIM), nn.Linear(6, 6)

    def forward(self, x):
        return x + F.pad(self.fc(self.norm(x)[:, :6].transpose(1, 2)).transpose(1, 2), (0, 0, 0, x.shape[1] - 6))


# The norms that stay, by block.
BLOCKS = {
    'pre': (PreNorm, []),
    'res_post': (ResPostNorm, []),
    'post': (PostNorm, ['norm']),
    'attention': (Attention, []),
    'shared_qk': (SharedQKNorm, ['k_norm']),
    'split_bias': (SplitBias, []),
    'torch_attention': (OwnAttention, []),
    'torch_attention_without_bias': (lambda: OwnAttention(bias=False), []),
    'parts': (PartsOfAWeight, []),
    'parts_without_bias': (lambda: PartsOfAWeight(bias=False), []),
    'part_read_elsewhere': (PartReadElsewhere, ['norm']),
    'overlapping_parts': (OverlappingParts, ['norm']),
    'positions': (PositionsBehindNorm, ['norm']),
    'windows': (Windows, []),
    'padded_windows': (lambda: Windows(padded=True), ['norm']),
    'token_in_front': (ClassToken, []),
    'token_behind': (lambda: ClassToken(behind=True), ['norm']),
    'merging': (Merging, []),
    'half_merging': (lambda: Merging(mixed=True), []),
    'pointwise': (Maps, []),
    'grouped': (lambda: Maps(groups=2), []),
    'padded': (lambda: Maps(kernel=3), ['norm']),
    'in_place': (InPlace, ['norm']),
    'relu': (Relu, ['norm']),
    'other_read': (OtherRead, ['norm']),
    'two_readers': (TwoReaders, ['norm']),
    'weight_read': (WeightRead, ['norm']),
    'gathered': (Gathered, []),
    'mixer': (Mixer, ['norm']),
}


class Net(nn.Module):
    """Blocks between an embedding of vectors of 5 and a head."""

    def __init__(self, names, pool='mean'):
        super().__init__()
        self.embed, self.embed_norm = nn.Linear(5, DIM), UN(DIM)
        self.blocks = nn.Sequential(*(BLOCKS[name][0]() for name in names))
        self.norm, self.head = UN(DIM), nn.Linear(DIM, 3)
        self.pool = pool

    def forward(self, x):
        x = self.norm(self.blocks(self.embed_norm(self.embed(x))))
        if self.pool == 'mean':
            x = x.mean(1)
        elif self.pool == 'max':
            x = x.amax(1)
        elif self.pool == 'first':
            x = x[:, 0]
        return self.head(x)

    def kept(self, names):
        kept = [f'blocks.{i}.{norm}' for i, name in enumerate(names) for norm in BLOCKS[name][1]]
        return kept + ['norm'] * (self.pool == 'max')
