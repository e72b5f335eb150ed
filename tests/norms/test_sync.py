"""Two processes with parts of a batch against one process with all of it."""
import copy

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mmunorm.norms import UN, SyncUN, UN2d, convert_sync, revert_sync

from .. import processes
from ..versions import compiles_as_one_graph
from .cases import NORMS, OFFLINE, build, sequence

CHANNELS, STEPS = 6, 24
# How many of each step's 24 tokens the first process gets.
SPLITS = [12, 12, 5, 24, 0, 17]
COMPILED = 'UN compiled as one graph'


def batches():
    """(x, dy, padded) of every step: all tokens, some padding, all padding and no token."""
    rng = np.random.default_rng(3)
    for t, x, dy in sequence(STEPS, CHANNELS, tokens=24, outlier_every=11):
        padded = rng.random(24) < (0.3 if t % 3 == 0 else 0.)
        if t == 23:
            padded[:] = True
        yield t, torch.from_numpy(x), torch.from_numpy(dy), torch.from_numpy(padded)


def train(norm, part, ranks=1, always_masked=False):
    """Trains on `part(t)` of every step's tokens; outputs, gradients and state of each."""
    out = []
    for t, x, dy, padded in batches():
        tokens = part(t)
        tx = x[tokens].requires_grad_()
        norm.zero_grad()
        y = norm(tx, padded[tokens] if t % 3 == 0 or t == 23 or always_masked else None)
        # DistributedDataParallel takes the mean of the ranks' gradients.
        y.backward(dy[tokens] * ranks)
        plain = getattr(norm, '_orig_mod', norm)
        out.append(dict(y=y.detach(), dx=tx.grad / ranks,
                        **{name: p.grad / ranks for name, p in plain.named_parameters()},
                        state={key: value.clone() for key, value in plain.state_dict().items()}))
    return out


def train_in_parts(rank):
    def part(t):
        split = SPLITS[t % len(SPLITS)]
        return slice(split, None) if rank else slice(split)

    found = {name: train(convert_sync(build(name, CHANNELS).double()), part, ranks=2) for name in OFFLINE}
    compiled = torch.compile(convert_sync(build('UN', CHANNELS).double()), fullgraph=compiles_as_one_graph(),
                             backend='aot_eager', dynamic=False)
    half = slice(12 * rank, 12 + 12 * rank)
    return {**found, COMPILED: train(compiled, lambda t: half, ranks=2, always_masked=True)}


@pytest.fixture(scope='module')
def in_parts():
    return processes.run(train_in_parts)


@pytest.mark.slow
@pytest.mark.parametrize('name', [*OFFLINE, COMPILED])
def test_two_processes_equal_one(name, in_parts):
    whole = train(build('UN' if name == COMPILED else name, CHANNELS).double(), lambda t: slice(None))
    tol = dict(rtol=1e-10, atol=1e-11)
    for step, a, b in zip(whole, in_parts[0][name], in_parts[1][name], strict=True):
        for key in ('y', 'dx'):
            torch.testing.assert_close(torch.cat([a[key], b[key]]), step[key], **tol, msg=key)
        for key in step.keys() - {'y', 'dx', 'state'}:
            torch.testing.assert_close(a[key] + b[key], step[key], **tol, msg=key)
        for key, value in step['state'].items():
            torch.testing.assert_close(a['state'][key], value, **tol, msg=key)
            # The outlier decision must never differ, not even by rounding.
            assert torch.equal(a['state'][key], b['state'][key]), key
    if name == 'UN':
        assert whole[-1]['state']['num_outliers'] > 0


def no_tokens(rank):
    """And a small variance with a large mean."""
    results = []
    for name in OFFLINE:
        norm = convert_sync(build(name, CHANNELS))
        for tokens in (5, 0, 5):
            x = torch.randn(tokens, CHANNELS, requires_grad=True)
            norm(x).sum().backward()
            assert x.grad.isfinite().all()
        results.append({key: value.clone() for key, value in norm.state_dict().items()})
        norm.eval()(torch.randn(rank, CHANNELS))  # without the other process
        if rank:
            norm(torch.randn(3, CHANNELS))
    norm = convert_sync(NORMS['TokenBN'].build(4))
    norm(with_a_large_mean()[rank * 700:700 + rank * 1300])
    return results, norm


def with_a_large_mean():
    return torch.randn(2000, 4, generator=torch.Generator().manual_seed(0)) + 1e4


def test_no_tokens_anywhere_and_no_communication_in_eval():
    (first, norm), (second, norm_of_second) = processes.run(no_tokens)
    for name, one, other in zip(OFFLINE, first, second, strict=True):
        assert one['num_batches_tracked'] == 3
        for key, value in one.items():
            assert value.isfinite().all() and torch.equal(value, other[key]), (name, key)
    var, mean = torch.var_mean(with_a_large_mean().double(), 0)
    for tracked in (norm, norm_of_second):
        torch.testing.assert_close(tracked.running_var, 0.9 + 0.1 * var.float(), rtol=1e-5, atol=0)
        torch.testing.assert_close(tracked.running_mean, 0.1 * mean.float(), rtol=1e-6, atol=0)


class Net(nn.Module):

    def __init__(self, norm, use_reentrant=None):
        super().__init__()
        self.first, self.norm, self.again = nn.Linear(4, CHANNELS), norm, copy.deepcopy(norm)
        self.last = nn.Linear(CHANNELS, 1)
        self.use_reentrant = use_reentrant

    def block(self, x):
        return self.again(self.norm(x) * 2 + torch.relu(x))

    def forward(self, x):
        x = self.first(x)
        if self.use_reentrant is None:
            x = self.block(self.block(x))  # the same norms twice before the backward pass
        else:
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.last(x).square().mean()


def train_net(net, rank, ranks, steps=10):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        x = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = net(x[rank::ranks])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def make_net(use_reentrant=None):
    torch.manual_seed(0)
    return Net(SyncUN(CHANNELS, warmup_iters=4), use_reentrant).double()


def train_ddp(rank, variants):
    results = []
    for use_reentrant in variants:
        net = make_net(use_reentrant)
        losses = train_net(DistributedDataParallel(net, static_graph=True), rank, 2)
        results.append((losses, net.state_dict()))
    return results


@pytest.mark.slow
def test_a_model_in_ddp_with_and_without_activation_checkpointing():
    """A recomputed forward must not communicate: it would hang, or mix two norms' statistics."""
    net = make_net()
    losses = train_net(net, 0, 1)
    a, b = processes.run(train_ddp, [None, False, True])
    for (loss_a, state_a), (loss_b, state_b) in zip(a, b, strict=True):
        torch.testing.assert_close((loss_a + loss_b) / 2, losses, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state_a, net.state_dict(), rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(state_a, state_b, rtol=1e-12, atol=1e-12)


def test_without_a_process_group_it_is_un():
    norm, sync = build('UN').double(), SyncUN(CHANNELS, warmup_iters=6).double()
    sync.load_state_dict(norm.state_dict())
    a, b = (train(layer, lambda t: slice(None)) for layer in (norm, sync))
    assert all(torch.equal(one['dx'], other['dx']) for one, other in zip(a, b, strict=True))


def test_convert_and_revert():
    model = nn.Sequential(UN(4), nn.LayerNorm(4), nn.Sequential(UN2d(4), SyncUN(4)), NORMS['RMSN'].build(4))
    assert [norm.synchronized for norm in (model[0], *model[2])] == [False, False, True]
    assert convert_sync(model) is model
    assert all(norm.synchronized for norm in (model[0], *model[2]))
    assert 'synchronized=True' in repr(model[0])
    assert revert_sync(model) is model
    assert not any(norm.synchronized for norm in (model[0], *model[2]))
    assert SyncUN(4).synchronized  # the class is as it was
    assert isinstance(MODELS.build(dict(type='SyncUN', num_features=4, window=2)), UN)
