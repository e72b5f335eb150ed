from types import SimpleNamespace

import pytest
import torch

from projects.deep.deep import ResidualHook
from tests.versions import amp_on_a_cpu

from .runs import BackboneModel, backbone_runner

BRANCH = dict(type='BranchNorm', warmup_iters=8)


def train(*args, residual_cfg=BRANCH, **kwargs):
    run = backbone_runner(*args, residual_cfg, hooks=['ResidualHook'], **kwargs)
    run.train()
    return run


def checkpoint(work_dir, step):
    return torch.load(work_dir / f'iter_{step}.pth', weights_only=False)['state_dict']


def test_does_not_count_what_mmengines_scaler_skips(tmp_path, monkeypatch):
    amp_on_a_cpu(monkeypatch)
    run = train(tmp_path, 6, optim_wrapper=dict(type='AmpOptimWrapper', loss_scale=dict(init_scale=2.**125)))
    skipped = round(125 - torch.tensor(run.optim_wrapper.loss_scaler.get_scale()).log2().item())
    assert 0 < skipped < 6 and run.model.backbone.update_clock.updates == 6 - skipped


@pytest.mark.parametrize('steps, updates, accumulated, end', [
    (7, 0, 1, 7), (4, 3, 1, 7), (4, 4, 1, 8), (21, 0, 3, 7), (22, 0, 3, 8)])
def test_warns_of_a_run_that_ends_before_t(steps, updates, accumulated, end):
    """Also another `train()` of the same Runner, which does not count twice."""
    model, warnings = BackboneModel(BRANCH), []
    model.backbone.update_clock.updates.fill_(updates)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = SimpleNamespace(
        model=model, iter=5, max_iters=5 + steps, logger=SimpleNamespace(warning=warnings.append),
        optim_wrapper=SimpleNamespace(optimizer=optimizer, _accumulative_counts=accumulated))
    for _ in range(2):
        ResidualHook().before_train(run)
    assert warnings == ["BranchNorm's branches never reach their full weight: the run ends at update 7, and "
                        'warmup_iters=8. Choose a smaller warmup_iters in residual_cfg.'] * 2 * (end < 8)
    optimizer.step()
    assert model.backbone.update_clock.updates == updates + 1


def test_resumes_in_the_middle_of_the_ramp_as_without_a_break(tmp_path):
    """Updates count, not iterations; the last one has the remaining gradients."""
    settings = dict(residual_cfg=dict(type='BranchNorm', warmup_iters=6), optim_wrapper=dict(accumulative_counts=2))
    train(tmp_path / 'whole', 13, **settings)
    middle = tmp_path / 'whole' / 'iter_6.pth'
    assert checkpoint(tmp_path / 'whole', 6)['backbone.update_clock.updates'] == 3
    train(tmp_path / 'resumed', 13, load_from=str(middle), resume=True, **settings)
    expected, state = (checkpoint(tmp_path / name, 13) for name in ('whole', 'resumed'))
    assert expected['backbone.update_clock.updates'] == 7
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_admin_measures_a_batch_of_a_new_run_and_no_other(tmp_path):
    admin = dict(type='Admin')
    first = train(tmp_path / 'first', 6, residual_cfg=admin).model.backbone
    weights = [layer.residual2.weight for layer in first.layers]
    assert all((weight - 1).abs().min() > 1e-3 for weight in weights)
    run = backbone_runner(tmp_path / 'tuned', 1, admin, load_from=str(tmp_path / 'first' / 'iter_6.pth'))
    run.load_or_resume()
    ResidualHook().before_train(run)
    for layer, weight in zip(run.model.backbone.layers, weights, strict=True):
        assert torch.equal(layer.residual2.weight, weight)
