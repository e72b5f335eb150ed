from types import SimpleNamespace

import pytest
import torch
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import OPTIM_WRAPPERS

from mmunorm.engine import ResidualHook

from .. import backbone_runs
from ..versions import CPUGradScaler

BRANCH = dict(type='BranchNorm', warmup_iters=8)


def runner(work_dir, max_iters, residual_cfg=BRANCH, **kwargs):
    return backbone_runs.runner(work_dir, max_iters, residual_cfg, hooks=['ResidualHook'], **kwargs)


def train(*args, **kwargs):
    run = runner(*args, **kwargs)
    run.train()
    return run.model.backbone


def checkpoint(work_dir, step):
    return torch.load(work_dir / f'iter_{step}.pth', weights_only=False)['state_dict']


def test_counts_updates_and_not_iterations(tmp_path):
    accumulated = train(tmp_path, 10, optim_wrapper=dict(accumulative_counts=4))
    assert accumulated.update_clock.updates == 3  # at steps 4, 8 and 10, the last with what is left over


def test_does_not_count_what_mmengines_scaler_skips(tmp_path, monkeypatch):
    """On a CPU, which the wrapper would refuse, and without its autocast: the scale alone is at stake."""
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(amp_optimizer_wrapper, 'GradScaler', CPUGradScaler)
    monkeypatch.setattr(OPTIM_WRAPPERS.get('AmpOptimWrapper'), 'optim_context',
                        OPTIM_WRAPPERS.get('OptimWrapper').optim_context)
    run = runner(tmp_path, 6, optim_wrapper=dict(type='AmpOptimWrapper', loss_scale=dict(init_scale=2.**125)))
    run.train()
    skipped = round(125 - torch.tensor(run.optim_wrapper.loss_scaler.get_scale()).log2().item())
    assert 0 < skipped < 6 and run.model.backbone.update_clock.updates == 6 - skipped


def begun(model, steps, accumulated=1):
    """A run of so many steps in which the hook has begun, without its loop: its optimizer, and what was warned of."""
    warnings = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = SimpleNamespace(
        model=model, iter=5, max_iters=5 + steps, logger=SimpleNamespace(warning=warnings.append),
        optim_wrapper=SimpleNamespace(optimizer=optimizer, _accumulative_counts=accumulated))
    ResidualHook().before_train(run)
    return run, warnings


@pytest.mark.parametrize('steps, updates, accumulated, end', [
    (7, 0, 1, 7), (4, 3, 1, 7), (4, 4, 1, 8), (21, 0, 3, 7), (22, 0, 3, 8)])
def test_warns_of_a_run_that_ends_before_t(steps, updates, accumulated, end):
    model = backbone_runs.Model(BRANCH)
    model.backbone.update_clock.updates.fill_(updates)
    _, warnings = begun(model, steps, accumulated)
    assert warnings == ["BranchNorm's branches never get their whole weight: the run ends at update 7, and "
                        'warmup_iters=8. Choose a smaller warmup_iters in residual_cfg.'] * (end < 8)


def test_a_second_train_of_the_same_runner_counts_once():
    model = backbone_runs.Model(BRANCH)
    run, _ = begun(model, 9)
    ResidualHook().before_train(run)
    run.optim_wrapper.optimizer.step()
    assert model.backbone.update_clock.updates == 1


def test_resumes_in_the_middle_of_the_ramp_as_without_a_break(tmp_path):
    settings = dict(residual_cfg=dict(type='BranchNorm', warmup_iters=6), optim_wrapper=dict(accumulative_counts=2))
    train(tmp_path / 'whole', 12, **settings)
    middle = tmp_path / 'whole' / 'iter_6.pth'
    assert checkpoint(tmp_path / 'whole', 6)['backbone.update_clock.updates'] == 3
    train(tmp_path / 'resumed', 12, load_from=str(middle), resume=True, **settings)
    expected, state = (checkpoint(tmp_path / name, 12) for name in ('whole', 'resumed'))
    assert expected['backbone.update_clock.updates'] == 6
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_admin_measures_a_batch_of_a_new_run_and_no_other(tmp_path):
    admin = dict(type='Admin')
    first = train(tmp_path / 'first', 6, admin)
    weights = [layer.residual2.weight for layer in first.layers]
    assert all((weight - 1).abs().min() > 1e-3 for weight in weights)
    run = runner(tmp_path / 'tuned', 1, admin, load_from=str(tmp_path / 'first' / 'iter_6.pth'))
    run.load_or_resume()
    ResidualHook().before_train(run)
    for layer, weight in zip(run.model.backbone.layers, weights, strict=True):
        assert torch.equal(layer.residual2.weight, weight)
