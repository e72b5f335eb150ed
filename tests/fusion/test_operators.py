"""A list of functions may touch a residual stream; every other one keeps it, whatever it does on the example."""
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from mmunorm import fuse_norms
from mmunorm.fusion import tags

from . import models

WIDTH, TOKENS = 8, 6


class Net(nn.Module):
    """Two blocks with something between them."""

    def __init__(self, between):
        super().__init__()
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.norm1, self.fc1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc3 = nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.token, self.gate = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.zeros(1))
        self.between = between

    def forward(self, x):
        x = self.embed(x)
        x = x + self.fc1(self.norm1(x))
        for function in self.between:
            x = function(self, x)
        x = x + self.fc2(self.norm2(x))
        return self.head(self.norm(x)).mean(1)


# Return tokens `(B, N, C)` with the same channels.
ALLOWED = {
    'roll': lambda m, x: x.roll(1, 1),
    'flip': lambda m, x: x.flip(1),
    'slice': lambda m, x: x[:, 1:],
    'index': lambda m, x: x[:, torch.arange(x.shape[1]).flip(0)],
    'mean of pairs': lambda m, x: x.unflatten(1, (-1, 2)).mean(2) if x.shape[1] % 2 == 0 else x,
    'map': lambda m, x: x.mT.unsqueeze(-1).flatten(2).mT.contiguous(),
    'pad': lambda m, x: F.pad(x, (0, 0, 0, 2)),
    'class token': lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], 1),
    'position': lambda m, x: x + m.token,
    'constant': lambda m, x: 0.5 * x / 3,
    'gate': lambda m, x: x + m.gate * x,
    'layer scale': lambda m, x: x + m.scale * m.fc3(x),
    'mask of tokens': lambda m, x: x * (torch.arange(x.shape[1]) % 3 > 0).to(x.dtype)[:, None],
    'difference': lambda m, x: x - m.fc1(m.norm1(x)),
    'dropout': lambda m, x: F.dropout(x, 0.5, m.training),
    'pool': lambda m, x: F.avg_pool1d(x.mT, 2).mT if x.shape[1] > 3 else x,
    'interpolate': lambda m, x: F.interpolate(x.mT, scale_factor=2.).mT,
    'shape': lambda m, x: x * (torch._shape_as_tensor(x)[1] / x.shape[1]),
    'cast': lambda m, x: x.float().to(x.dtype),
    'in place': lambda m, x: x.clone().add_(m.fc1(m.norm1(x))),
}


class Twice(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x):
        return x.abs() + x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def tokens_by(score):
    def choose(m, x):
        index = score(x).topk(3, 1).indices
        return x.gather(1, index[..., None].expand(-1, -1, WIDTH))

    return choose


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(max=1e9)


SCRIPTED = torch.jit.script(scripted)


# Each does something on other inputs that the example does not show, or is no linear function of a token.
REFUSED = {
    'longest tokens': tokens_by(lambda x: x.norm(dim=-1)),
    'largest sums': tokens_by(lambda x: x.abs().sum(-1)),
    'one channel': tokens_by(lambda x: x[..., 0]),
    'clamp': lambda m, x: x.clamp(-1e9, 1e9),
    'in-place clamp': lambda m, x: x.clone().clamp_(-1e9, 1e9),
    'comparison': lambda m, x: x.where(x < 1e30, 0.),
    'branch': lambda m, x: x + 1 if bool((x > 1e9).any()) else x,
    'value': lambda m, x: x * (1 if x.flatten()[0].item() < 1e9 else 2),
    'list': lambda m, x: x * (1 if x.flatten().tolist()[0] < 1e9 else 2),
    'numpy': lambda m, x: x + float(x.detach().numpy().max() > 1e9),
    'float': lambda m, x: x * (1 if float(x.flatten()[0]) < 1e9 else 2),
    'equal': lambda m, x: x * (2 if torch.equal(x, x + 1) else 1),
    'argmax': lambda m, x: x.gather(1, x.argmax(1, keepdim=True).expand(x.shape)),
    'sort': lambda m, x: x.sort(1).values,
    'maximum over tokens': lambda m, x: x.amax(1, keepdim=True),
    'max over tokens': lambda m, x: x.max(1, keepdim=True).values,
    'maximum of two': lambda m, x: torch.maximum(x, x.roll(1, 1)),
    'fmax of two': lambda m, x: torch.fmax(x, x.roll(1, 1)),
    'maximum of neighbours': lambda m, x: F.max_pool1d(x.mT, 2).mT,
    'maximum of a map': lambda m, x: F.adaptive_max_pool2d(x.mT[..., None], (3, 1))[..., 0].mT,
    'maximum by index': lambda m, x: x.scatter_reduce(1, torch.zeros_like(x[:, :2], dtype=torch.long), x, 'amax'),
    'greater': lambda m, x: x + x.gt(1e9),
    'median': lambda m, x: x.median(1, keepdim=True).values,
    'quantile': lambda m, x: x.quantile(0.5, 1, keepdim=True),
    'relu': lambda m, x: x.relu(),
    'power': lambda m, x: x**1,
    'product': lambda m, x: x * x.roll(1, 1),
    'gate of itself': lambda m, x: x * x.mean(-1, keepdim=True).sigmoid(),
    'added number': lambda m, x: x + 1,
    'added tensor': lambda m, x: x + torch.linspace(0, 1, WIDTH, dtype=x.dtype),
    'factor a channel': lambda m, x: x * torch.linspace(1, 2, WIDTH, dtype=x.dtype),
    'scaled stream': lambda m, x: x * m.scale,
    'channels': lambda m, x: x.flip(-1),
    'part of the channels': lambda m, x: torch.cat([x[..., :4], x[..., 4:].roll(1, 1)], -1).roll(1, -1),
    'matrix': lambda m, x: x @ torch.eye(WIDTH, dtype=x.dtype),
    'einsum': lambda m, x: torch.einsum('bnc,cd->bnd', x, torch.eye(WIDTH, dtype=x.dtype)),
    'softmax over tokens': lambda m, x: x.softmax(1),
    'cumulated': lambda m, x: x.cumsum(1),
    'rounded': lambda m, x: x.round(decimals=12),
    'constant beside it': lambda m, x: torch.cat([torch.ones_like(x[:, :1]), x], 1),
    'mean with padding': lambda m, x: F.pad(x[:, :5], (0, 0, 0, 1)).unflatten(1, (-1, 2)).mean(2),
    'padded by 1': lambda m, x: F.pad(x, (0, 0, 0, 1), value=1.),
    'normalized by a function': lambda m, x: F.layer_norm(x, (WIDTH, )),
    'TorchScript': lambda m, x: SCRIPTED(x),
    'autograd function': lambda m, x: Twice.apply(x),
    'written to': lambda m, x: x.clone().index_fill_(1, torch.tensor([0]), 0.),
    'assigned': lambda m, x: assigned(x.clone()),
    'stored': lambda m, x: stored(m, x),
    'transposed product': lambda m, x: (x @ x.mT).softmax(-1) @ x,
}


def assigned(x):
    x[:, 0] = 0.
    return x


def stored(m, x):
    m.features = [x]
    return x


def check(names):
    torch.manual_seed(0)
    functions = [{**ALLOWED, **REFUSED}[name] for name in names]
    model = models.randomize(Net(functions).double(), gamma='none')
    x = [scale * torch.randn(2, TOKENS, 5, dtype=torch.float64) for scale in (1., 1., 30.)]
    before = [model(one) for one in x]
    report = fuse_norms(model, example=[(x[0], )], rotate='hadamard')
    assert [fold.norm for fold in report.reduced] == ['norm1', 'norm2', 'norm']
    for one, expected in zip(x, before, strict=True):
        models.assert_equal([model(one)], [expected], 1e-6 if 'cast' in names else 1e-9)
    return report


@pytest.mark.parametrize('name', ALLOWED)
def test_linear_functions_may_touch_a_rotated_stream(name):
    report = check([name])
    assert len(report.streams) == 1 and set(report.streams[0].norms) == {'norm1', 'norm2', 'norm'}


@pytest.mark.parametrize('name', REFUSED)
def test_every_other_function_keeps_the_stream(name):
    report = check([name])
    touched = {fold.norm for fold in report.reduced if fold.not_rotated}
    assert 'norm1' in touched and not any('norm1' in stream.norms for stream in report.streams)
    assert all(fold.not_rotated.code != 'stream differs' for fold in report.reduced if fold.not_rotated)


@pytest.mark.parametrize('later', ['roll', 'constant', 'layer scale'])
def test_a_token_that_no_sample_shows(later, monkeypatch):
    monkeypatch.setattr(tags, '_SAMPLE', 1)
    assert not check(['mean with padding', later]).streams


@settings(max_examples=25, phases=[Phase.generate], deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))
@given(allowed=st.lists(st.sampled_from(sorted(ALLOWED)), max_size=3),
       refused=st.lists(st.sampled_from(sorted(set(REFUSED) - {'channels', 'part of the channels'})), max_size=1),
       order=st.integers(0, 3))
def test_any_row_of_functions(allowed, refused, order):
    names = [*allowed[:order], *refused, *allowed[order:]]
    report = check(names)
    assert refused or len(report.streams) == 1
