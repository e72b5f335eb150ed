"""Activation checkpointing: a recomputed forward is the step it was, with and without torch.compile."""
import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmunorm.norms import UN, compiled

from .test_family import build, every_norm, every_offline_norm
from .test_un import sequence

both_modes = pytest.mark.parametrize('use_reentrant', [False, True])


def twice_in_one(norm, x, checkpoint):
    return checkpoint(lambda v: norm(norm(v) * 2 + v), x)


def twice_in_two(norm, x, checkpoint):
    return checkpoint(norm, checkpoint(norm, x) * 2 + x)


def side_by_side(norm, x, checkpoint):
    return checkpoint(norm, x) + checkpoint(norm, x * 2) * 3 + norm(x + 1)


def once(norm, x, checkpoint):
    return checkpoint(lambda v: norm(v) * 1, x)


@every_norm
@both_modes
@pytest.mark.parametrize('model', [once, twice_in_one, twice_in_two, side_by_side])
def test_a_recomputed_forward_is_the_same_step(name, use_reentrant, model):
    """Activation checkpointing: same outputs, gradients and state, and a layer may run several times."""
    plain, recomputed = build(name), build(name)
    for _, x, dy in sequence(24, 6):
        results = []
        for norm, run in ((plain, lambda f, v: f(v)),
                          (recomputed, lambda f, v: checkpoint(f, v, use_reentrant=use_reentrant))):
            tx = torch.from_numpy(x).float().requires_grad_()
            norm.zero_grad()
            y = model(norm, tx, run)
            y.backward(torch.from_numpy(dy).float())
            results.append([y.detach(), tx.grad, *(p.grad for p in norm.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(value, recomputed.state_dict()[key], msg=key)


@every_norm
def test_gradient_accumulation_over_checkpointed_forwards(name):
    """Several forwards, one backward: each forward is a step, and each recomputation its own."""
    plain, recomputed = build(name), build(name)
    for norm, run in ((plain, lambda v: plain(v)),
                      (recomputed, lambda v: checkpoint(recomputed, v, use_reentrant=False))):
        generator = torch.Generator().manual_seed(0)
        for _ in range(8):
            inputs = [torch.randn(5, 6, generator=generator, requires_grad=True) for _ in range(3)]
            sum(run(x).pow(3).sum() for x in inputs).backward()
        norm.last = [x.grad for x in inputs]
    for a, b in zip(plain.last, recomputed.last, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(plain.state_dict(), recomputed.state_dict())


def assert_same_training(name, train, use_reentrant):
    """`train(norm, run)` gives the same gradients and leaves the same state with and without."""
    results = []
    for checkpointed in (False, True):
        norm = build(name).double()

        def run(f, x, *args, checkpointed=checkpointed):
            return checkpoint(f, x, *args, use_reentrant=use_reentrant) if checkpointed else f(x, *args)

        gradients = train(norm, run)
        results.append((gradients, [p.grad for p in norm.parameters()], norm.state_dict()))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def inputs(count):
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(9, 6, dtype=torch.float64, generator=generator) * (1 + i % 3)
        yield x.requires_grad_()


@every_norm
@both_modes
@pytest.mark.parametrize('late', [1, 3])
def test_backward_passes_that_are_late(name, use_reentrant, late):
    """A pipeline: each backward pass comes after `late` more forward ones. More steps than are kept."""

    def train(norm, run):
        xs, losses = list(inputs(80)), []
        for i, x in enumerate(xs):
            losses.append(run(norm, x).pow(3).sum())
            if i >= late:
                losses[i - late].backward()
        return [x.grad for x in xs[:-late]]

    assert_same_training(name, train, use_reentrant)


@every_offline_norm
@both_modes
def test_two_steps_with_equal_statistics(name, use_reentrant):
    """Two views of one batch: the second step's averages are not the first's."""

    def train(norm, run):
        xs = list(inputs(20))
        for i, x in enumerate(xs):
            (run(norm, x).pow(3).sum() + i * run(norm, x).square().sum()).backward()
        return [x.grad for x in xs]

    assert_same_training(name, train, use_reentrant)


@every_offline_norm
@both_modes
def test_a_step_without_statistics_is_no_other(name, use_reentrant):
    """Only padding, whose mean over tokens is NaN."""

    def train(norm, run):
        xs, padding = list(inputs(20)), torch.ones(9, dtype=torch.bool)
        for x in xs:
            (run(norm, x).pow(3).sum() + 0 * run(norm, x * 2, padding).sum()).backward()
        return [x.grad for x in xs]

    assert_same_training(name, train, use_reentrant)


class Block(nn.Module):

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.linear, self.second = build(name), nn.Linear(6, 6), build(name, seed=1)

    def forward(self, x):
        return torch.relu(self.linear(self.first(x))) + self.second(self.linear(x) * 2)


def assert_trains_alike(block, twin, run, steps=12):
    """`run(x)`, which runs `twin`, trains it as `block` is trained without a compiler."""
    for i, x in zip(range(steps), inputs(steps), strict=True):
        results = []
        for module, f in ((block, block), (twin, run)):
            tx = x.detach().float().requires_grad_()
            module.zero_grad()
            module.train()
            y = f(tx)
            (y * (y.detach() + i)).sum().backward()
            results.append([y.detach(), tx.grad, *(p.grad for p in module.parameters())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(twin.state_dict(), block.state_dict(), rtol=1e-4, atol=1e-4)
    assert block.first.num_batches_tracked == steps


@pytest.mark.parametrize('name', ['UN', 'PN*', 'PRepBN'])
@both_modes
def test_compiled_code_is_recomputed(name, use_reentrant):
    torch._dynamo.reset()
    block = Block(name)
    twin = copy.deepcopy(block)
    run = torch.compile(twin, backend='aot_eager', fullgraph=True)
    assert_trains_alike(block, twin, lambda x: checkpoint(run, x, use_reentrant=use_reentrant), steps=15)


@pytest.mark.parametrize('backend', ['aot_eager', 'aot_eager_decomp_partition',
                                     pytest.param('inductor', marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', ['UN', 'RepBN'])
def test_recomputation_is_compiled(name, backend):
    """`with_cp=True` in a model that is compiled."""
    torch._dynamo.reset()
    block = Block(name)
    twin = copy.deepcopy(block)
    run = torch.compile(lambda x: checkpoint(twin, x, use_reentrant=False) * 1, backend=backend,
                        fullgraph=True)
    assert_trains_alike(block, twin, run)


class Twice(nn.Module):

    def __init__(self):
        super().__init__()
        self.norm = UN(6, warmup_iters=3)

    def forward(self, x):
        return self.norm(x) + 2 * self.norm(x)


def test_compiled_steps_are_as_many_as_written():
    """Two calls on one input are two steps, also where no gradient of the input is asked for."""
    torch._dynamo.reset()
    plain, twin = Twice(), Twice()
    run = torch.compile(twin, backend='aot_eager_decomp_partition', fullgraph=True)
    for x in inputs(12):
        for f in (plain, run):
            y = f(x.detach().float())
            (y * y.detach()).sum().backward()
    torch.testing.assert_close(twin.norm.weight.grad, plain.norm.weight.grad)
    torch.testing.assert_close(twin.state_dict(), plain.state_dict())
    assert twin.norm.num_batches_tracked == 24


def test_norms_share_a_compiled_graph_but_nothing_else():
    torch._dynamo.reset()
    norms = [UN(6) for _ in range(12)]
    norms += copy.deepcopy(norms)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i, norm in enumerate(norms):
            norm.compile(backend='aot_eager', fullgraph=True)
            for _ in range(i % 3):
                norm(torch.randn(5, 6)).sum().backward()
    assert [norm.num_batches_tracked.item() for norm in norms] == [0, 1, 2] * 8


def test_what_a_compiler_overwrites_is_not_kept():
    norm = UN(6)
    measured, tokens = torch.rand(1, 6), torch.tensor(5.)
    results = torch.ops.mmunorm.begin_step(norm._number, measured, tokens)
    expected = measured.clone(), results[0].clone()
    for value in (measured, *results):
        value.zero_()
    step = norm._pending.recall(None)
    assert torch.equal(step.measured, expected[0]) and torch.equal(step.var_hat, expected[1])
    g, values = torch.rand(6), [value.clone() for value in results[:6]]
    psi, = torch.ops.mmunorm.average_gradient(norm._number, values, g, None)
    before = copy.deepcopy(norm.state_dict())
    for value in (g, psi, *values):
        value.fill_(7)
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)


def test_a_cuda_graph_is_refused(monkeypatch):
    """It would replay a step without what the host decides."""
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    norm = UN(6)
    with pytest.raises(RuntimeError, match="CUDA graph.*'default'"):
        torch.ops.mmunorm.begin_step(norm._number, torch.rand(1, 6), torch.tensor(5.))
    assert norm.num_batches_tracked == 0


def test_compiled_autograd_runs_a_backward_pass(monkeypatch):
    from torch._dynamo import compiled_autograd
    norm, x = UN(6), torch.rand(4, 6)
    y = norm(x)
    monkeypatch.setattr(compiled_autograd, 'in_compiled_autograd_region', True)
    assert torch.equal(norm(x), y) and norm.num_batches_tracked == 1


def test_a_norm_that_is_gone_is_forgotten():
    norm = UN(6)
    number = int(norm._number)
    assert compiled._norms[number] is norm
    del norm
    gc.collect()
    assert number not in compiled._norms
