"""Activation checkpointing: a recomputed forward is the step it was; with torch.compile it is refused."""
import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmunorm.norms import UN

from ..versions import checkpoints_compiled_code, compiles_as_one_graph
from .cases import OFFLINE, build

# Each trains `norm` on 24 inputs, with its checkpointed calls by `run(f, x)`.


def nested_calls(norm, run, xs):
    for x in xs:
        run(lambda v: norm(norm(v) * 2 + v), x).pow(3).sum().backward()


def side_by_side(norm, run, xs):
    for x in xs:
        (run(norm, run(norm, x) * 2 + x) + run(norm, x * 2) * 3 + norm(x + 1)).pow(3).sum().backward()


def accumulated(norm, run, xs):
    """Several forwards, one backward: each forward is a step, and each recomputation its own."""
    for i in range(0, len(xs), 3):
        sum(run(norm, x).pow(3).sum() for x in xs[i:i + 3]).backward()


def late(norm, run, xs):
    """A pipeline: each backward pass comes after three more forward ones. More steps than are kept."""
    losses = []
    for x in xs * 3:
        losses.append(run(norm, x).pow(3).sum())
        if len(losses) > 3:
            losses[-4].backward()


def out_of_order(norm, run, xs):
    """Every third backward pass comes after those of the next two forward passes."""
    for i in range(0, len(xs), 3):
        waiting = run(norm, xs[i]).pow(3).sum()
        for x in xs[i + 1:i + 3]:
            run(norm, x).pow(3).sum().backward()
        waiting.backward()


def without_backward(norm, run, xs):
    """Some forward passes have no backward pass: at the start, and in the middle."""
    for i, x in enumerate(xs):
        if i < 5 or i == 14:
            with torch.set_grad_enabled(i % 2 == 0):
                norm(x * 2)
        run(lambda v: norm(v) * 1, x).pow(3).sum().backward()


def equal_statistics(norm, run, xs):
    """Two views of one batch: the second step's averages are not the first's."""
    for i, x in enumerate(xs):
        (run(norm, x).pow(3).sum() + i * run(norm, x).square().sum()).backward()


def only_padding(norm, run, xs):
    """A step without statistics, whose mean over tokens is NaN, is no other."""
    padding = torch.ones(9, dtype=torch.bool)
    for x in xs:
        (run(norm, x).pow(3).sum() + 0 * run(norm, x * 2, padding).sum()).backward()


def inputs(count):
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(9, 6, dtype=torch.float64, generator=generator) * (1 + i % 3)
        yield x.requires_grad_()


@pytest.mark.parametrize('use_reentrant', [False, True])
@pytest.mark.parametrize('name, train', [
    *(('UN', train) for train in (nested_calls, side_by_side, accumulated, late, out_of_order, without_backward,
                                  equal_statistics, only_padding)),
    *((name, out_of_order) for name in OFFLINE if name != 'UN')])
def test_a_recomputed_forward_is_the_same_step(name, train, use_reentrant):
    """Same gradients and state with and without activation checkpointing."""
    results = []
    for checkpointed in (False, True):
        norm, xs = build(name).double(), list(inputs(24))

        def run(f, x, *args, checkpointed=checkpointed):
            return checkpoint(f, x, *args, use_reentrant=use_reentrant) if checkpointed else f(x, *args)

        train(norm, run, xs)
        results.append(([x.grad for x in xs], [p.grad for p in norm.parameters()], norm.state_dict()))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


# The second is torch's own, which may come first.
REFUSED = 'with_cp=False|modified by an inplace operation'


class Block(nn.Module):

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.linear, self.second = build(name), nn.Linear(6, 6), build(name, seed=1)

    def forward(self, x):
        return torch.relu(self.linear(self.first(x))) + self.second(self.linear(x) * 2)


@pytest.mark.slow
@pytest.mark.parametrize('name, use_reentrant', [('UN', False), ('MABN', True)])
def test_compiled_code_that_is_recomputed_is_refused(name, use_reentrant):
    """Each backward pass is refused, and the forward passes before it count once."""
    if not (use_reentrant or checkpoints_compiled_code()):
        pytest.skip("this torch runs no compiled code, LayerNorm's neither, in a checkpoint with use_reentrant=False")
    torch._dynamo.reset()
    block = Block(name)
    one_graph = compiles_as_one_graph()
    run = torch.compile(block, backend='aot_eager', fullgraph=one_graph)
    for x in inputs(3):
        y = checkpoint(run, x.detach().float().requires_grad_(), use_reentrant=use_reentrant)
        before = copy.deepcopy(block.state_dict())
        with pytest.raises(RuntimeError, match=REFUSED):
            y.square().sum().backward()
        if one_graph:
            torch.testing.assert_close(block.state_dict(), before, rtol=0, atol=0)
    assert block.first.num_batches_tracked == 3


def test_compiled_recomputation_is_refused_or_right():
    """`with_cp=True` in a model that is compiled. Older releases recompute nothing there."""
    if not compiles_as_one_graph():
        pytest.skip('this torch fails to compile a checkpoint whose content is not one graph')
    torch._dynamo.reset()
    block = Block('UN')
    plain = copy.deepcopy(block)
    run = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False) * 1,
                        backend='aot_eager_decomp_partition', fullgraph=True)  # as inductor divides the graph
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
