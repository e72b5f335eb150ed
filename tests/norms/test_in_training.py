"""Norms with state in training: freezing, copies, mixed precision, sharding."""
import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmunorm.backbones import UNSwinTransformer
from mmunorm.norms import UN, convert_sync

from .. import processes
from ..versions import needs_fully_shard
from .cases import (
    NORMS,
    OFFLINE,
    assert_finite_state,
    assert_same_state,
    build,
    every_offline_norm,
    sequence,
    train_step,
)


def step(norm, seed, scale=1):
    x, dy = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(seed))
    return train_step(norm, x, dy * scale)


@every_offline_norm
@pytest.mark.parametrize('frozen', [('weight', ), ('weight', 'bias'), ('bias', 'input')], ids='+'.join)
def test_without_some_gradients(name, frozen):
    """Frozen parts have no gradient; the rest is unchanged."""
    whole, partly = build(name), build(name)
    for key in set(frozen) - {'input'}:
        getattr(partly, key).requires_grad_(False)
    for _, x, dy in sequence(20, 6):
        grads = []
        for norm in (whole, partly):
            norm.zero_grad()
            tx = torch.from_numpy(x).float().requires_grad_(norm is whole or 'input' not in frozen)
            norm(tx).backward(torch.from_numpy(dy).float())
            grads.append(dict(input=tx.grad, **{key: p.grad for key, p in norm.named_parameters()}))
        for key, grad in grads[1].items():
            assert (grad is None) == (key in frozen), key
            if grad is not None:
                assert torch.equal(grad, grads[0][key]), key
    assert_same_state(whole, partly)


@every_offline_norm
def test_deepcopy_between_forward_and_backward(name):
    """A copy has no part in the current pass, and continues independently."""
    norm, undisturbed = build(name), build(name)
    copies = []
    handle = norm.register_forward_hook(lambda *_: copies.append(copy.deepcopy(norm)))
    for i in range(16):
        step(norm, i)
        step(undisturbed, i)
    assert_same_state(norm, undisturbed)
    handle.remove()
    twin = copies[-1]
    assert torch.equal(twin.running_var, norm.running_var)
    step(twin, 99)
    assert twin.num_batches_tracked == 17 and norm.num_batches_tracked == 16


CASTS = {
    'half': lambda model: model.half(),
    'to float16': lambda model: model.to(torch.float16),
    'to bfloat16, by a tensor': lambda model: model.to(torch.empty(0, dtype=torch.bfloat16)),
    'from float64': lambda model: model.double().half(),
}


@pytest.mark.parametrize('name, cast', [*((name, 'half') for name in OFFLINE), *(('UN', cast) for cast in CASTS)])
def test_in_half_precision_statistics_stay_in_float32(name, cast):
    """A channel with a root mean square of 900, whose square is infinite in float16."""
    norm = build(name)
    x, dy = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(0))
    x[:, 3] *= 900
    for _ in range(20):
        train_step(norm, x, dy)
    half = CASTS[cast](nn.Sequential(copy.deepcopy(norm)))[0]
    assert {parameter.dtype for parameter in half.parameters()} == {half.weight.dtype} != {torch.float32}
    for key, buffer in norm.named_buffers():
        assert torch.equal(half.get_buffer(key), buffer) and half.get_buffer(key).dtype == buffer.dtype, key
    x, dy = x.to(half.weight.dtype), dy.to(half.weight.dtype)
    torch.testing.assert_close(half.eval()(x).float(), norm.eval()(x.float()), rtol=2e-2, atol=2e-2)
    norm.train(), half.train()
    for _ in range(8):
        ours, theirs = train_step(half, x, dy), train_step(norm, x.float(), dy.float())
    torch.testing.assert_close([value.float() for value in ours[:2]], theirs[:2], rtol=3e-2, atol=3e-2)
    for key, buffer in norm.named_buffers():  # psi and its record contain gamma, which was rounded
        torch.testing.assert_close(half.get_buffer(key), buffer, rtol=2e-2, atol=2e-3, msg=key)


@every_offline_norm
@pytest.mark.parametrize('assign', [False, True])
def test_a_checkpoint_in_half_precision(name, assign):
    norm, loaded = build(name), build(name)
    step(norm, 0, 100)
    state = {key: value.half() if value.is_floating_point() else value for key, value in norm.state_dict().items()}
    loaded.load_state_dict(state, assign=assign)
    for key, buffer in loaded.named_buffers():
        assert buffer.dtype == norm.get_buffer(key).dtype and torch.equal(buffer, state[key].to(buffer.dtype)), key
    state['running_var'][1] = float('inf')
    with pytest.warns(UserWarning, match='1.running_var is not finite.* mmunorm.update_norms'):
        nn.Sequential(nn.Identity(), loaded).load_state_dict({f'1.{key}': value for key, value in state.items()})


@every_offline_norm
def test_statistics_of_a_norm_that_is_built_in_half_precision(name):
    torch.set_default_dtype(torch.float16)
    try:
        norm = NORMS[name].build(6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert norm.weight.dtype == torch.float16 and norm.running_var.dtype == torch.float32


def make_swin(norm='UN', **kwargs):
    torch.manual_seed(0)
    return UNSwinTransformer(
        arch=dict(embed_dims=12, depths=[1, 1], num_heads=[1, 2]), img_size=32, window_size=4,
        drop_path_rate=0., out_indices=(0, 1), norm_cfg=dict(type=norm, window=2, warmup_iters=2), **kwargs)


def train_swin(model, rank, ranks):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(4):
        x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        optimizer.zero_grad()
        sum(y.square().mean() for y in model(x[rank::ranks])).backward()
        optimizer.step()


def shard(model):
    from torch.distributed.fsdp import fully_shard
    for stage in model.stages:
        for block in stage.blocks:
            fully_shard(block)
    fully_shard(model)
    return model


def train_sharded(rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    results = {}
    for kind in ('sync', 'plain'):
        model = shard(make_swin('SyncUN' if kind == 'sync' else 'UN', with_cp=kind == 'sync').double())
        train_swin(model, rank, 2)
        norm = model.stages[0].blocks[0].norm1
        assert type(norm.weight).__name__ == type(norm.weight.data).__name__ == 'DTensor'
        assert type(norm.running_var) is torch.Tensor
        results[kind] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model = make_swin().double()
    train_swin(DistributedDataParallel(model, broadcast_buffers=False), rank, 2)
    results['ddp'] = model.state_dict()
    return results


@needs_fully_shard
@pytest.mark.slow
def test_fully_sharded():
    """SyncUN with FSDP2 and checkpointing is one process with the whole batch; UN is what it is in DDP."""
    whole = make_swin().double()
    train_swin(whole, 0, 1)
    a, b = processes.run(train_sharded)
    torch.testing.assert_close(dict(a['sync']), dict(whole.state_dict()), rtol=1e-7, atol=1e-9)
    # Each rank keeps its own buffers; get_model_state_dict returns those of the first.
    torch.testing.assert_close(a['plain'], dict(a['ddp']), rtol=1e-7, atol=1e-9)
    assert not torch.equal(a['ddp']['stages.0.blocks.0.norm1.running_var'],
                           b['ddp']['stages.0.blocks.0.norm1.running_var'])


def accumulate(rank):
    norm = convert_sync(UN(6, warmup_iters=3))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), norm))
    for i in range(9):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))[rank::2]
        if i % 3 < 2:
            with model.no_sync():  # no gradient is exchanged, the statistics are
                model(x).pow(3).sum().backward()
        else:
            model(x).pow(3).sum().backward()
            model.zero_grad()
    return norm.state_dict()


def test_synchronized_gradient_accumulation():
    a, b = processes.run(accumulate)
    assert a['num_batches_tracked'] == 9
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@every_offline_norm
@pytest.mark.parametrize('average', [None, torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)])
def test_buffers_can_be_averaged(name, average):
    """As those of torch's BatchNorm, counters included."""
    model = nn.Sequential(build(name))
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    for _, x, dy in sequence(8, 6):
        train_step(model[0], x, dy)
        averaged.update_parameters(model)
    assert averaged.module[0].num_batches_tracked.dtype == torch.long
    assert_finite_state(averaged.module[0])
    assert not torch.equal(averaged.module[0].running_var, model[0].running_var)
