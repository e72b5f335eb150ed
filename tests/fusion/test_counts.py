"""Full-size models have no norm left: none among their modules, and none in what a forward pass computes."""

import copy
from collections import Counter

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmunorm import fuse_norms
from mmunorm.norms.layers import is_norm

from .. import tiny_runs
from . import models


class Trace(TorchDispatchMode):
    """Counts the operators of a forward pass; views and the like, which compute nothing, are left out."""

    NOTHING = {
        'view',
        '_unsafe_view',
        't',
        'transpose',
        'permute',
        'expand',
        'reshape',
        'unsqueeze',
        'squeeze',
        'slice',
        'select',
        'unbind',
        'detach',
        'alias',
        'split',
        'as_strided',
        'unfold',
    }

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix('aten::')
        if name not in self.NOTHING:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def trace(model, x):
    with torch.no_grad(), Trace() as mode:
        model.extract_feat(x) if hasattr(model, 'with_bbox') else model(x)
    return mode.counts


def difference(one, other):
    return {name: one[name] - other[name] for name in one | other if one[name] != other[name]}


def build(config):
    cfg = Config.fromfile(tiny_runs.ROOT / 'configs' / f'{config}.py')
    init_default_scope(cfg.default_scope)
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    return MODELS.build(cfg.model).eval()


def without_norms(model):
    model = copy.deepcopy(model)
    for name in models.norms(model):
        parent, _, child = name.rpartition('.')
        setattr(model.get_submodule(parent), child, nn.Identity())
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    'config, norms, bias, full, padded',
    [
        # The linear layers that get a bias: those of the patch mergings, whose input is strided; qkv.
        ('swin_t_un_imagenet', 29, {'add': 3}, (224, 224), (228, 236)),
        ('swin_t_un_maskrcnn_3x', 32, {'add': 3}, (224, 224), None),
        ('t2t_vit_14_un_imagenet', 33, {'mm': -14, 'addmm': 14}, (64, 64), None),
    ],
)
def test_nothing_is_left_of_the_norms(config, norms, bias, full, padded):
    model = build(config)
    x = torch.randn(1, 3, *full)
    assert len(models.norms(model)) == norms
    unfolded, norm_free = trace(model, x), without_norms(model)
    expected = trace(norm_free, x)
    report = fuse_norms(model, strict=True)
    assert len(report.folded) == norms and not report.kept
    assert not any(map(is_norm, model.modules()))

    assert difference(trace(model, x), expected) == bias
    # What the norms had computed: the trace can see it.
    gone = difference(unfolded, expected)
    assert gone['rsqrt'] == norms and gone['mul'] + gone.get('addcmul', 0) >= norms

    if padded:
        x = torch.randn(1, 3, *padded)
        # Each of 12 blocks pads, then writes the fill to the lower rows and to the right columns; after that
        # the stock method pads by nothing, which copies.
        assert difference(trace(model, x), trace(norm_free, x)) == {
            **bias,
            'constant_pad_nd': 12,
            'copy_': 2 * 12,
        }
