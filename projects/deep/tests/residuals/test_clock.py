"""BranchNorm's weight grows with optimizer updates alone."""
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from projects.deep.deep import ResidualSwinTransformer
from projects.deep.deep.residuals import branch_weight, count_updates
from tests.versions import cpu_grad_scaler

from .models import IMAGES, vit

LINEAR = dict(type='BranchNorm', warmup_iters=8)


def count(model):
    return int(model.update_clock.updates)


@given(t=st.integers(0, 10**7), warmup_iters=st.integers(0, 10**6))
def test_growth_by_its_formula(t, warmup_iters):
    share = t / warmup_iters if t < warmup_iters else 1
    expected = dict(
        linear=share,
        exponential=(math.exp(5 * share) - 1) / (math.exp(5) - 1),
        sigmoid=0.5 + math.tanh(6 * share - 3) / (2 * math.tanh(3)))
    for schedule, value in expected.items():
        weight = branch_weight(torch.tensor(t), warmup_iters, schedule)
        assert weight.dtype == torch.float64 and weight.shape == ()
        assert abs(weight.item() - value) < 1e-12
        assert (weight == 1) == (t >= warmup_iters) or 1 - value < 1e-12
        assert weight != 0 or value < 1e-12


@pytest.mark.filterwarnings('ignore:torch.utils.checkpoint')
def test_counts_optimizer_steps_and_no_forward_passes():
    model = ResidualSwinTransformer(
        dict(embed_dims=8, depths=[2], num_heads=[2]), img_size=32, window_size=4, out_indices=(0, ), with_cp=True,
        residual_cfg=LINEAR).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = count_updates(model, optimizer)
    for step in range(3):
        for _ in range(4):  # an accumulated gradient, with activation checkpointing
            model(torch.randn(1, 3, 32, 32))[0].sum().backward()
        model.eval()(torch.randn(1, 3, 32, 32))
        model.train()
        assert count(model) == step
        optimizer.step()
        optimizer.zero_grad()
    assert count(model) == 3
    handle.remove()
    optimizer.step()
    assert count(model) == 3


def test_counts_with_a_schedule_and_the_compiler():
    """torch 2.1 drops hooks of optimizers after a compilation; schedules wrap `step` as well."""
    torch.compile(torch.nn.Identity(), backend='eager')(torch.ones(1))
    model = vit(LINEAR, 2).train()
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch.optim.lr_scheduler.ConstantLR(optimizer)
    count_updates(model, optimizer)
    after = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # a schedule warns of an unnoticed step
        for step in range(1, 4):
            model(torch.randn(IMAGES))[0].sum().backward()
            optimizer.step()
            before.step()
            after.step()
            assert count(model) == step


def test_a_step_that_the_gradient_scaler_skips_does_not_count():
    model = vit(LINEAR, 1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count_updates(model, optimizer)
    scaler = cpu_grad_scaler(init_scale=2.)
    for overflows, expected in ((False, 1), (True, 1), (False, 2)):
        optimizer.zero_grad()
        loss = model(torch.randn(IMAGES))[0].square().sum()
        scaler.scale(loss * (float('inf') if overflows else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert count(model) == expected


@pytest.mark.parametrize('found, expected', [(torch.tensor(0.), 1), (torch.tensor([1.]), 0)])
def test_a_fused_optimizer_checks_itself_whether_it_skips(found, expected):
    model = vit(LINEAR, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda: None
    count_updates(model, optimizer)
    optimizer.found_inf = found  # as the scaler sets it during the step
    optimizer.step()
    assert count(model) == expected


def test_warns_of_training_without_count_updates():
    model = vit(LINEAR, 1, counted=False).train()
    with pytest.warns(UserWarning, match='count_updates'):
        model(torch.randn(IMAGES))
    count_updates(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model(torch.randn(IMAGES))
        vit(LINEAR, 1, counted=False).eval()(torch.randn(IMAGES))
