import copy

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from torch import nn

import mmunorm  # noqa: F401
from mmunorm.norms import MABN, UN, DyT, NoNorm


class Block(nn.Module):
    """Norms under names that a `custom_keys={'norm': ...}` finds and does not find."""

    def __init__(self, norm):
        super().__init__()
        self.norm1 = norm(8)
        self.ln2 = norm(8)
        self.fc = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), norm(8))


PARAMWISE = [
    dict(norm_decay_mult=0.),
    dict(norm_decay_mult=0., bias_decay_mult=0.5, bias_lr_mult=2.),
    dict(custom_keys={'norm1': dict(decay_mult=0.3, lr_mult=0.1)}, flat_decay_mult=0.),
    {},
]


ADAMW = dict(optimizer=dict(type='AdamW', lr=0.1, weight_decay=0.05))


def settings_by_name(model, paramwise_cfg):
    wrapper = build_optim_wrapper(model, dict(ADAMW, paramwise_cfg=paramwise_cfg))
    names = {p: name for name, p in model.named_parameters()}
    settings = {names[p]: (group['lr'], group['weight_decay'])
                for group in wrapper.optimizer.param_groups for p in group['params']}
    assert len(settings) == len(names)
    return settings


@pytest.mark.parametrize('paramwise_cfg', PARAMWISE, ids=str)
def test_un_gets_what_layer_norm_gets(paramwise_cfg):
    expected = settings_by_name(Block(nn.LayerNorm), paramwise_cfg)
    assert settings_by_name(Block(UN), paramwise_cfg) == expected
    if paramwise_cfg == PARAMWISE[0]:
        assert expected['ln2.weight'] == expected['inner.1.bias'] == (0.1, 0.)
        assert expected['fc.weight'] == (0.1, 0.05)


@pytest.mark.parametrize('norm', [MABN, DyT, lambda c: NoNorm(c, affine=True)])
def test_no_parameter_of_any_norm_decays(norm):
    settings = settings_by_name(Block(norm), dict(norm_decay_mult=0., bias_lr_mult=2.))
    for name, setting in settings.items():
        linear = name.startswith(('fc', 'inner.0'))
        assert setting == ((0.2 if linear and name.endswith('bias') else 0.1), 0.05 if linear else 0.)


def test_a_compiled_step_over_parameter_groups():
    """mmengine's own groups are ConfigDicts: Dynamo of torch 2.14 fails on them, whatever the norms."""
    torch._dynamo.reset()
    stock = Block(nn.LayerNorm)
    twin = copy.deepcopy(stock)
    for model, compiles in ((stock, False), (twin, True)):
        # As in a config: Dynamo does not fail on a plain dict.
        cfg = ConfigDict(ADAMW, paramwise_cfg=PARAMWISE[0])
        optimizer = build_optim_wrapper(model, cfg).optimizer
        step = torch.compile(optimizer.step, backend='eager') if compiles else optimizer.step
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        for _ in range(2):
            step()
    torch.testing.assert_close(twin.state_dict(), stock.state_dict())


def test_layer_decay_of_mmpretrain():
    from mmpretrain.registry import OPTIM_WRAPPER_CONSTRUCTORS as CONSTRUCTORS

    def settings(norm):
        model = Block(norm)
        model.get_layer_depth = lambda name: (0 if 'norm1' in name else 1, 2)
        constructor = CONSTRUCTORS.build(dict(
            type='LearningRateDecayOptimWrapperConstructor', optim_wrapper_cfg=ADAMW,
            paramwise_cfg=dict(norm_decay_mult=0., layer_decay_rate=0.5)))
        return {group['param_name']: (group['lr'], group['weight_decay'])
                for group in constructor(model).optimizer.param_groups}

    assert settings(UN) == settings(nn.LayerNorm)
    assert settings(UN)['ln2.weight'] == (0.1, 0.) and settings(UN)['norm1.bias'] == (0.05, 0.)


def test_from_every_scope():
    """mmdet's and mmpretrain's registries ask the root registry for this constructor."""
    from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, DefaultScope
    for scope in ('mmdet', 'mmpretrain'):
        with DefaultScope.overwrite_default_scope(scope):
            assert settings_by_name(Block(UN), dict(norm_decay_mult=0.))['ln2.weight'] == (0.1, 0.)
        with OPTIM_WRAPPER_CONSTRUCTORS.switch_scope_and_registry(scope) as registry:
            cls = registry.get('DefaultOptimWrapperConstructor')
        assert cls.__module__ == 'mmunorm.engine.optimizer'
