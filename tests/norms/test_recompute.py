"""Activation checkpointing: a recomputed forward is the step it was; with torch.compile it is refused."""
import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmunorm.norms import UN, algorithm

from ..versions import checkpoints_compiled_code, compiles_as_one_graph
from .cases import build, every_norm, every_offline_norm, sequence

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


@every_norm
@both_modes
def test_backward_passes_out_of_order(name, use_reentrant):
    """Every third one comes after those of the next two forward passes."""

    def train(norm, run):
        xs, late = list(inputs(30)), None
        for i, x in enumerate(xs):
            loss = run(norm, x).pow(3).sum()
            if i % 3 == 0:
                late = loss
                continue
            loss.backward()
            if i % 3 == 2:
                late.backward()
        return [x.grad for x in xs]

    assert_same_training(name, train, use_reentrant)


@every_offline_norm
@both_modes
@pytest.mark.parametrize('grad', [True, False])
def test_forward_passes_without_a_backward_pass_are_forgotten(name, use_reentrant, grad, monkeypatch):
    """Some at the start, one in the middle; then a recomputed forward pass has one step again to choose from."""
    measured = []
    measure = algorithm.measure
    monkeypatch.setattr(algorithm, 'measure', lambda *args: measured.append(1) or measure(*args))

    def train(norm, run):
        xs = list(inputs(40))
        for i, x in enumerate(xs):
            if i < 5 or i == 20:
                with torch.set_grad_enabled(grad):
                    norm(x * 2)
            measured.clear()
            run(norm, x).pow(3).sum().backward()
            assert len(measured) == 1 or not grad and (i < 14 or 20 <= i < 30)
        return [x.grad for x in xs]

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


# The second is torch's own, which may come first.
REFUSED = 'with_cp=False|modified by an inplace operation'


class Block(nn.Module):

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.linear, self.second = build(name), nn.Linear(6, 6), build(name, seed=1)

    def forward(self, x):
        return torch.relu(self.linear(self.first(x))) + self.second(self.linear(x) * 2)


def assert_refused(block, run):
    """The first backward pass is refused, and the forward passes before it count once."""
    for x in inputs(3):
        y = run(x.detach().float().requires_grad_())
        before = copy.deepcopy(block.state_dict())
        with pytest.raises(RuntimeError, match=REFUSED):
            y.square().sum().backward()
        torch.testing.assert_close(block.state_dict(), before, rtol=0, atol=0)
    assert block.first.num_batches_tracked == 3


# One of each way to a step: the refusal is the same code in all.
@pytest.mark.slow
@pytest.mark.parametrize('name, use_reentrant', [('UN', False), ('UN', True), ('RepBN', True), ('MABN', True)])
def test_compiled_code_that_is_recomputed_is_refused(name, use_reentrant):
    if not (use_reentrant or checkpoints_compiled_code()):
        pytest.skip("this torch runs no compiled code, LayerNorm's neither, in a checkpoint with use_reentrant=False")
    torch._dynamo.reset()
    block = Block(name)
    run = torch.compile(block, backend='aot_eager', fullgraph=compiles_as_one_graph())
    assert_refused(block, lambda x: checkpoint(run, x, use_reentrant=use_reentrant))


@pytest.mark.parametrize('name, backend', [
    ('UN', 'aot_eager_decomp_partition'), ('RepBN', 'aot_eager'),
    pytest.param('UN', 'inductor', marks=pytest.mark.slow)])
def test_compiled_recomputation_is_refused_or_right(name, backend):
    """`with_cp=True` in a model that is compiled. Older releases recompute nothing there."""
    if not compiles_as_one_graph():
        pytest.skip('this torch fails to compile a checkpoint whose content is not one graph')
    torch._dynamo.reset()
    block = Block(name)
    plain = copy.deepcopy(block)
    run = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False) * 1, backend=backend,
                        fullgraph=True)
    for x in inputs(3):
        gradients = []
        for call in (plain, run):
            x = x.detach().float().requires_grad_()
            loss = call(x).square().sum()
            try:
                loss.backward()
            except RuntimeError as error:
                assert call is run and re.search(REFUSED, str(error))
                assert block.first.num_batches_tracked == plain.first.num_batches_tracked
                return
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close(block.state_dict(), plain.state_dict())


def test_compiled_autograd_runs_a_backward_pass(monkeypatch):
    compiled_autograd = pytest.importorskip('torch._dynamo.compiled_autograd')
    if not hasattr(compiled_autograd, 'in_compiled_autograd_region'):
        pytest.skip('this torch does not tell whether compiled autograd runs')
    norm, x = UN(6), torch.rand(4, 6)
    y = norm(x)
    monkeypatch.setattr(compiled_autograd, 'in_compiled_autograd_region', True)
    assert torch.equal(norm(x), y) and norm.num_batches_tracked == 1
