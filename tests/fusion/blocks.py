"""Small blocks of which some fold and some do not, as people write them; all take and give tokens `(B, N, 8)`."""
import torch
import torch.nn.functional as F
from torch import nn

from mmunorm.norms import UN, UN2d

DIM = 8
BLOCKS = {}  # by name: what builds a block, and which of its norms stay


class Block(nn.Module):
    """Parts, and a function of these and what goes in."""

    def __init__(self, compute, parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.compute = compute

    def forward(self, *args, **kwargs):
        return self.compute(self, *args, **kwargs)


def block(parts, kept=(), **variants):
    """Registers a function as a block; `variants` are names of blocks with other parts, and which norms stay there."""

    def register(compute):
        for name, (make, stays) in {compute.__name__: (parts, kept), **variants}.items():
            BLOCKS[name] = lambda make=make: Block(compute, make()), list(stays)
        return compute

    return register


def norm_and(**layers):
    """Builds a norm and linear layers of these inputs and outputs, and whether they have a bias."""
    return lambda: dict(norm=UN(DIM), **{name: nn.Linear(*sizes) for name, sizes in layers.items()})


def heads():
    return dict(norm_and(qkv=(DIM, 3 * DIM, False), proj=(DIM, DIM))(), q_norm=UN(DIM // 2), k_norm=UN(DIM // 2))


def attention_of_torch(bias=True):
    return lambda: dict(norm=UN(DIM), attn=nn.MultiheadAttention(DIM, 2, bias=bias, batch_first=True))


def maps(kernel=1, groups=1):
    return lambda: dict(conv1=nn.Conv2d(DIM, DIM, 3, padding=1, groups=DIM), norm=UN2d(DIM), mix=nn.Conv2d(DIM, DIM, 1),
                        conv2=nn.Conv2d(DIM, DIM, kernel, padding=kernel // 2, groups=groups))


mlp = norm_and(fc1=(DIM, 12), fc2=(12, DIM))
one, two = norm_and(fc=(DIM, DIM)), norm_and(fc1=(DIM, DIM), fc2=(DIM, DIM))


@block(mlp)
def pre(self, x):
    return x + self.fc2(self.fc1(self.norm(x)).relu())


@block(mlp)
def res_post(self, x):
    return x + self.norm(self.fc2(self.fc1(x).relu()))


@block(mlp, kept=['norm'])
def post(self, x):
    return self.norm(x + self.fc2(self.fc1(x).relu()))


def attend(self, x, k_norm):
    q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, DIM // 2)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(self.q_norm(q), k_norm(k), v)
    return x + self.proj(y.transpose(1, 2).flatten(2))


@block(heads)
def attention(self, x):
    return attend(self, x, self.k_norm)


@block(heads, kept=['k_norm'])
def shared_qk(self, x):
    return attend(self, x, self.q_norm)


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


BLOCKS['split_bias'] = SplitBias, []


@block(attention_of_torch(), torch_attention_without_bias=(attention_of_torch(bias=False), []))
def torch_attention(self, x):
    y = self.norm(x)
    return x + self.attn(y, y, y, need_weights=False)[0]


@block(attention_of_torch(), parts_without_bias=(attention_of_torch(bias=False), []))
def parts(self, x):
    """mmcv's: queries, keys and values are other tensors, and torch cuts the weight in three."""
    y = self.norm(x)
    return x + self.attn(y.clone(), y.clone(), y.clone())[0]


@block(attention_of_torch(), kept=['norm'])
def positions(self, x):
    """DETR's: queries and keys get positions."""
    y = self.norm(x)
    places = torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[:, None].expand(x.shape[1], DIM)
    return x + self.attn(y + places, y + places, y)[0]


@block(norm_and(fc=(DIM, 3 * DIM)), kept=['norm'])
def overlapping_parts(self, x):
    """Two layers share rows of one weight."""
    y, (weight, bias) = self.norm(x), (self.fc.weight, self.fc.bias)
    first = F.linear(y, weight[:2 * DIM], bias[:2 * DIM])
    return first[..., :DIM] + F.linear(x, weight[DIM:2 * DIM], bias[DIM:2 * DIM])


@block(norm_and(fc=(DIM, 2 * DIM)))
def other_part_read_elsewhere(self, x):
    """Something else reads other rows of the weight."""
    read, other = self.fc.weight.chunk(2)
    return F.linear(self.norm(x), read, self.fc.bias[:DIM]) + other.mean()


@block(norm_and(fc=(DIM, DIM)), kept=['norm'])
def part_read_elsewhere(self, x):
    """Something else reads some rows of the weight."""
    return self.fc(self.norm(x)) + self.fc.weight[2:4].mean()


@block(norm_and(fc=(DIM, DIM, False)), kept=['norm'], with_and_without_bias=(one, ['norm']))
def called_in_two_ways(self, x):
    """A bias of the module would reach one of the calls alone."""
    y = self.norm(x)
    return x + self.fc(y) + F.linear(y, self.fc.weight)


@block(two, kept=['norm'])
def shared_bias(self, x):
    return x + F.linear(self.norm(x), self.fc1.weight, self.fc2.bias) + self.fc2(x)


@block(one, kept=['norm'])
def bias_read_elsewhere(self, x):
    return x + self.fc(self.norm(x)) + self.fc.bias.exp()


def in_windows(self, y, tokens):
    if y.shape[1] % 4:
        return self.fc(y)
    return self.fc(y.unflatten(1, (-1, 4)).transpose(1, 2)).transpose(1, 2).flatten(1, 2)[:, :tokens]


@block(one)
def windows(self, x):
    """A roll and windows of 4 tokens."""
    return x + in_windows(self, self.norm(x).roll(1, 1), x.shape[1]).roll(-1, 1)


@block(one, kept=['norm'])
def padded_windows(self, x):
    y = F.pad(self.norm(x), (0, 0, 0, -x.shape[1] % 4)) if x.shape[1] % 4 else self.norm(x)
    return x + in_windows(self, y, x.shape[1])


def with_token():
    return dict(norm_and(q=(DIM, DIM), kv=(DIM, 2 * DIM, False))(), token=nn.Parameter(torch.randn(1, 1, DIM)))


def attend_to_class(self, x, y):
    k, v = self.kv(y).chunk(2, -1)
    return x + F.scaled_dot_product_attention(self.q(y[:, :1]), k, v)


@block(with_token)
def token_before_norm(self, x):
    return attend_to_class(self, x, self.norm(torch.cat([self.token.expand(len(x), -1, -1), x], 1)))


@block(with_token, kept=['norm'])
def token_after_norm(self, x):
    return attend_to_class(self, x, torch.cat([self.token.expand(len(x), -1, -1), self.norm(x)], 1))


@block(norm_and(fc=(2 * DIM, DIM, False)))
def merging(self, x):
    """Norms of two neighbours side by side."""
    y = self.norm(x)
    return x + self.fc(torch.cat([y.roll(1, 1), y], -1))


@block(norm_and(fc=(2 * DIM, DIM, False)))
def half_merging(self, x):
    return x + self.fc(torch.cat([self.norm(x).roll(1, 1), x], -1))


@block(maps(), grouped=(maps(groups=2), []), padded=(maps(kernel=3), ['norm']))
def pointwise(self, x):
    """ConvNeXt's: a depthwise convolution, a norm over its map, and a convolution, padded or not."""
    y = x.transpose(1, 2).unsqueeze(-1)
    return x + self.mix(self.conv2(self.norm(self.conv1(y).relu())).relu()).squeeze(-1).transpose(1, 2)


@block(two, kept=['norm'])
def in_place(self, x):
    """`x` changes before the output of the norm is read."""
    x = x * 1
    y = self.norm(x)
    x += self.fc1(y).relu()
    x += self.fc2(y)
    return x


@block(mlp, kept=['norm'])
def relu(self, x):
    return x + self.fc2(self.fc1(F.relu_(self.norm(x))))


@block(one, kept=['norm'])
def two_readers(self, x):
    """A layer reads the norm, and in another place something else."""
    return self.fc(x) + self.fc(self.norm(x))


@block(one, kept=['norm'])
def source_read_elsewhere(self, x):
    y = self.fc(x)
    return x + self.norm(y).relu() + y.abs()


@block(two, kept=['norm'])
def source_read_by_a_layer(self, x):
    y = self.fc1(x)
    return x + self.norm(y).relu() + self.fc2(y)


@block(one, kept=['norm'])
def bias_of_source_read_elsewhere(self, x):
    return x + self.norm(self.fc(x)).relu() + self.fc.bias.abs()


@block(one, kept=['norm'])
def rounded(self, x):
    y = self.norm(x)
    return x + self.fc(y.long().to(y.dtype))


@block(one, kept=['norm'])
def as_bits(self, x):
    y = self.norm(x)
    return x + self.fc(y.view(torch.int64).to(y.dtype) / 2**60)


@block(mlp)
def gathered(self, x):
    """Some tokens, by index."""
    y = self.norm(x)[:, torch.arange(x.shape[1]).flip(0)]
    y = torch.stack([y[:, 0], y[:, -1]], 1).mean(1, keepdim=True)
    return x + self.fc2(self.fc1(y).relu())


@block(norm_and(fc=(6, 6)), kept=['norm'])
def mixer(self, x):
    """A layer over 6 tokens, not over channels."""
    return x + F.pad(self.fc(self.norm(x)[:, :6].transpose(1, 2)).transpose(1, 2), (0, 0, 0, x.shape[1] - 6))


class Net(nn.Module):
    """Blocks between an embedding of vectors of 5 and a head."""

    def __init__(self, names, pool='mean'):
        super().__init__()
        self.embed, self.embed_norm = nn.Linear(5, DIM), UN(DIM)
        self.blocks = nn.Sequential(*(BLOCKS[name][0]() for name in names))
        self.norm, self.head = UN(DIM), nn.Linear(DIM, 3)
        self.pool = {'mean': lambda x: x.mean(1), 'max': lambda x: x.amax(1), 'first': lambda x: x[:, 0],
                     '': lambda x: x}[pool]
        self.kept = [f'blocks.{i}.{norm}' for i, name in enumerate(names) for norm in BLOCKS[name][1]]
        self.kept += ['norm'] * (pool == 'max')

    def forward(self, x):
        return self.head(self.pool(self.norm(self.blocks(self.embed_norm(self.embed(x))))))
