"""Replay: parts that have finished are not computed again, and the results are those of whole passes."""
import copy
from functools import partial

import pytest
import torch
from torch import nn

from mmunorm import convert_norms
from mmunorm.conversion import convert
from mmunorm.conversion.replay import Replay

from ..fusion.blocks import Block
from ..fusion.models import swin_classifier
from .models import assert_same, layer_norm, tokens

BATCHES = list(tokens(3, 20, 6))


class Counted(nn.Module):
    """A residual block that counts its calls."""

    def __init__(self, channels=6, seed=0):
        super().__init__()
        self.norm, self.linear = layer_norm(channels, seed), nn.Linear(channels, channels)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.linear(self.norm(x))


# It writes to what a block has returned.
in_place = partial(Block, lambda self, x: x.add_(1), {})


def whole_passes(monkeypatch):
    """Without any memory, every pass is a whole one."""
    monkeypatch.setattr(convert, 'Replay', lambda model, norms, memory: Replay(model, norms, memory=0))


def branches():
    """Which block runs first depends on the batch, so that the second one is not converted when it runs."""
    return Block(lambda self, x: self.b(self.a(x)) if x[0, 0] > 0 else self.a(self.b(x)),
                 dict(a=Counted(), b=Counted(seed=1)))


def unlike_tokens():
    x = tokens(2, 20, 6)
    x[0, 0, 0], x[1, 0, 0] = 1, -1
    return list(x)


# `repeated`: norms run again after those that are fitted later, which changes their errors.
@pytest.mark.parametrize('make, batches, repeated', [
    (lambda: nn.Sequential(Counted(), in_place(), Counted(seed=1), in_place(), Counted(seed=2)), BATCHES, False),
    (lambda: nn.Sequential(*[nn.Sequential(Counted(), Counted(seed=1))] * 2, Counted(seed=2)), BATCHES, True),
    (lambda: Block(lambda self, x: self.b(y := self.a(x)) + self.c(y), dict(a=Counted(), b=Counted(), c=Counted())),
     BATCHES, False),
    (branches, unlike_tokens(), True),
    (lambda: swin_classifier(dict(type='LN')), [dict(inputs=torch.randn(2, 3, 32, 32)) for _ in range(2)], False),
], ids=['in_place', 'shared_nested', 'read_twice', 'order_of_the_batch', 'swin'])
def test_results_are_those_of_whole_passes(make, batches, repeated, monkeypatch):
    model, lines = make(), []
    whole = copy.deepcopy(model)
    monkeypatch.setattr(convert, 'print_log', lambda line, logger: lines.append(line))
    report = convert_norms(model, batches)
    assert len(lines) == repeated
    whole_passes(monkeypatch)
    assert report == convert_norms(whole, batches)
    assert_same(model, whole)


OUTSIDE = []


class Leaky(Counted):
    """Passes its output on in another way than by returning it."""

    def __init__(self, way, owner, **kwargs):
        super().__init__(**kwargs)
        self.way, self.owner, self.found = way, owner, {}
        self.register_buffer('state', torch.zeros(6))

    def forward(self, x):
        y = super().forward(x)
        leak = LEAKS.get(self.way)
        returned = leak(self, x, y) if leak else y
        return returned if self.way in ('in_place', 'dict') else y


LEAKS = {
    'list': lambda block, x, y: OUTSIDE.append(y),
    'view': lambda block, x, y: OUTSIDE.append(y[:, :3]),
    'input': lambda block, x, y: OUTSIDE.append(x),
    'attribute': lambda block, x, y: block.found.update(kept=(y, )),
    'other': lambda block, x, y: setattr(block.owner[0], 'kept', 2 * y),
    'buffer': lambda block, x, y: block.state.copy_(y.mean(0)),
    'in_place': lambda block, x, y: torch.zeros_like(x.mul_(2).add_(y)),
    'dict': lambda block, x, y: dict(y=y),
    'numbers': lambda block, x, y: OUTSIDE.append(y.tolist()),
}


def true_error(model, norm, ln, batches):
    """The error of a converted norm, from its real inputs and outputs."""
    seen = []
    norm.register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    with torch.no_grad():
        for batch in batches:
            model(batch.clone())
    x, y = map(torch.cat, zip(*seen, strict=True))
    return ((y - ln(x)).square().sum() / (ln(x) - ln.bias).square().sum()).item()


WAYS = {
    'list': lambda block, x: OUTSIDE[-1],
    'view': lambda block, x: OUTSIDE[-1].repeat(1, 2),
    'input': lambda block, x: OUTSIDE[-1],
    'attribute': lambda block, x: block.found['kept'][0],
    'other': lambda block, x: block.owner[0].kept,
    'buffer': lambda block, x: x + block.state,
    'in_place': lambda block, x: x,
    'numbers': lambda block, x: torch.tensor(OUTSIDE[-1]),
    'dict': lambda block, x: OUTSIDE[-1]['y'],
    'hook': lambda block, x: block.found['kept'],
    'child_hook': lambda block, x: block.found['kept'],
}


def tensor_of(output):
    """A block's output, or that in its dict, which is kept, and replaced there."""
    if isinstance(output, torch.Tensor):
        return output
    OUTSIDE.append(dict(output))
    return output.pop('y')


def leaky(way):
    """Two blocks, of which the first leaks into the last norm, in a part that can be replayed as a whole."""
    torch.manual_seed(0)
    block = Leaky(way, owner=[nn.Identity()])
    first = Block(lambda self, x: self.b(tensor_of(self.a(x))), dict(a=block, b=Counted(seed=1)))
    if 'hook' in way:
        read = block.linear if 'child' in way else block
        read.register_forward_hook(lambda module, args, y: block.found.update(kept=y))
    return Block(lambda self, x: self.c(self.first(x)) + self.last(WAYS[way](block, x)),
                 dict(first=first, c=Counted(seed=3), last=layer_norm(6, 2)))


@pytest.mark.parametrize('way', WAYS)
def test_what_leaves_a_block_otherwise_is_not_replayed(way, monkeypatch):
    batches = [scale * batch + shift for batch, scale, shift in zip(BATCHES, (1, 3, 0.3), (0, 2, -4), strict=True)]
    model, whole, lines = leaky(way).eval(), leaky(way).eval(), []
    given = [batches[0], dict(x=batches[1]), *batches[2:]]
    monkeypatch.setattr(convert, 'print_log', lambda line, logger: lines.append(line))
    report = convert_norms(model, given)
    assert len(lines) == (way == 'numbers')  # the last pass finds these
    assert report.norms[-1].after == pytest.approx(true_error(model, model.last, layer_norm(6, 2), batches), rel=1e-3)
    whole_passes(monkeypatch)
    assert report == convert_norms(whole, given)


def test_errors_are_those_of_the_model_that_is_returned():
    """The second block reads less or more of the first one's error when all norms are converted."""
    model, batches = branches(), unlike_tokens()
    norms = {name: copy.deepcopy(model.get_submodule(name)) for name in ('a.norm', 'b.norm')}
    for row in convert_norms(model.eval(), batches).norms:
        true = true_error(model, model.get_submodule(row.norm), norms[row.norm], batches)
        assert row.after == pytest.approx(true, rel=1e-3)


def test_a_block_that_has_finished_is_not_computed_again(monkeypatch):
    model = nn.Sequential(*(Counted(seed=i) for i in range(8)))
    whole = copy.deepcopy(model)
    convert_norms(model, [tokens(20, 6)])
    # All of the first and the last pass, the pass that stops in the block, and the next, which finishes it.
    assert [block.calls for block in model] == [4] * 7 + [3]
    whole_passes(monkeypatch)
    convert_norms(whole, [tokens(20, 6)])
    assert [block.calls for block in whole] == [10 - i for i in range(8)]
    assert not any('forward' in vars(module) for module in model.modules())


@pytest.mark.parametrize('nested, calls', [(False, [1, 1, 3]), (True, [1, 1, 1])])
def test_no_more_memory_than_allowed(nested, calls):
    """A part takes the room of those inside."""
    blocks, x = [Counted(seed=i) for i in range(3)], tokens(20, 6)
    model = nn.Sequential(nn.Sequential(*blocks[:2]), blocks[2]) if nested else nn.Sequential(*blocks)
    with Replay(model, [block.norm for block in blocks], memory=2 * x.numel() * 4) as replay, torch.no_grad():
        for _ in range(3):
            replay.start(0)
            model(x)
    assert [block.calls for block in blocks] == calls


def test_an_error_ends_it():
    model = nn.Sequential(Counted(), Counted())
    with pytest.raises(RuntimeError), Replay(model, [model[1].norm]) as replay:
        replay.start(0)
        model(torch.randn(5, 7))
    assert not any('forward' in vars(module) for module in model.modules())
