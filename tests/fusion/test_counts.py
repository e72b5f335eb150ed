"""Models of full depth have no norm left: none among their modules, and none in what a forward pass computes."""
import copy
from collections import Counter

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


SWIN = dict(arch=dict(embed_dims=24, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24]))
T2T = dict(embed_dims=24, layer_cfgs=dict(num_heads=2, feedforward_channels=72))


@pytest.mark.slow
@pytest.mark.parametrize('config, narrow, norms, bias, size, padded', [
    # The linear layers that get a bias: those of the patch mergings, whose input is strided; qkv.
    ('swin_t_un_imagenet', dict(backbone=SWIN, head=dict(in_channels=192)), 29, {'add': 3}, (224, 224), (228, 236)),
    ('swin_t_un_maskrcnn_3x', dict(backbone=SWIN, neck=dict(in_channels=[24, 48, 96, 192])), 32, {'add': 3}, (224, 224),
     None),
    ('t2t_vit_14_un_imagenet', dict(backbone=T2T, head=dict(in_channels=24)), 33, {'mm': -14, 'addmm': 14}, (64, 64),
     None),
])
def test_nothing_is_left_of_the_norms(config, narrow, norms, bias, size, padded):
    """Channels are few: they do not change the operators."""
    cfg = Config.fromfile(tiny_runs.ROOT / 'configs' / f'{config}.py')
    for part, settings in narrow.items():
        cfg.model[part].update(settings)
    init_default_scope(cfg.default_scope)
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    model = MODELS.build(cfg.model).eval()
    norm_free = copy.deepcopy(model)
    for name in models.norms(model):
        parent, _, child = name.rpartition('.')
        setattr(norm_free.get_submodule(parent), child, nn.Identity())
    expected = operators(norm_free, size)
    assert difference(operators(model, size), expected)['rsqrt'] == norms  # the trace can see what the norms compute
    assert len(fuse_norms(model, strict=True).folded) == norms and not models.norms(model)
    assert difference(operators(model, size), expected) == bias
    if padded:  # each of 12 blocks pads, and writes the fill to the lower rows and to the right columns; after that
        # the stock method pads by nothing, which copies
        assert difference(operators(model, padded), operators(norm_free, padded)) == {
            **bias, 'constant_pad_nd': 12, 'copy_': 2 * 12}
