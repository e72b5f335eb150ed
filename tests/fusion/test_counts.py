"""A folded model has no norm left: none among its modules, and none in what a forward pass computes."""
import copy
from collections import Counter
from functools import partial

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmunorm import fuse_norms

from .. import tiny_runs
from . import models


class OperatorCounter(TorchDispatchMode):
    """Counts the operators of a forward pass, except views."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.arguments)
        if not is_view and '_unsafe_view' not in func._schema.name:
            self.counts[func._schema.name.removeprefix('aten::')] += 1
        return func(*args, **(kwargs or {}))


def operators(model, size):
    with OperatorCounter() as mode:
        models.outputs(model, torch.randn(1, 3, *size))
    return mode.counts


def difference(one, other):
    return {name: one[name] - other[name] for name in one | other if one[name] != other[name]}


def shipped(config, **narrow):
    """The model of a config at full depth. Its channels are few: they do not change the operators."""
    cfg = Config.fromfile(tiny_runs.ROOT / 'configs' / f'{config}.py')
    for part, settings in narrow.items():
        cfg.model[part].update(settings)
    init_default_scope(cfg.default_scope)
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    return MODELS.build(cfg.model)


SWIN = dict(arch=dict(embed_dims=24, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24]))
T2T = dict(embed_dims=24, layer_cfgs=dict(num_heads=2, feedforward_channels=72))


@pytest.mark.parametrize('make, norms, bias, size, padded, blocks', [
    # The linear layers that get a bias: those of the patch mergings, whose input is strided; qkv.
    (models.swin_classifier, 11, {'add': 1}, (32, 32), (37, 53), 4),
    (models.detector, 12, {'add': 1}, (64, 64), (68, 76), 4),
    (models.t2t_classifier, 9, {'mm': -2, 'addmm': 2}, (64, 64), None, 0),
    pytest.param(partial(shipped, 'swin_t_un_imagenet', backbone=SWIN, head=dict(in_channels=192)), 29, {'add': 3},
                 (224, 224), (228, 236), 12, marks=pytest.mark.grid),
    pytest.param(partial(shipped, 'swin_t_un_maskrcnn_3x', backbone=SWIN, neck=dict(in_channels=[24, 48, 96, 192])), 32,
                 {'add': 3}, (224, 224), None, 0, marks=pytest.mark.grid),
    pytest.param(partial(shipped, 't2t_vit_14_un_imagenet', backbone=T2T, head=dict(in_channels=24)), 33,
                 {'mm': -14, 'addmm': 14}, (64, 64), None, 0, marks=pytest.mark.grid),
])
def test_nothing_is_left_of_the_norms(make, norms, bias, size, padded, blocks):
    model = make().eval()
    norm_free = copy.deepcopy(model)
    for name in models.norms(model):
        parent, _, child = name.rpartition('.')
        setattr(norm_free.get_submodule(parent), child, nn.Identity())
    expected = operators(norm_free, size)
    assert difference(operators(model, size), expected)['rsqrt'] == norms  # the trace can see what the norms compute
    assert len(fuse_norms(model, strict=True).folded) == norms and not models.norms(model)
    assert difference(operators(model, size), expected) == bias
    if padded:  # each block pads, and writes the fill to the lower rows and to the right columns; after that
        # the stock method pads by nothing, which copies
        assert difference(operators(model, padded), operators(norm_free, padded)) == {
            **bias, 'constant_pad_nd': blocks, 'copy_': 2 * blocks}
