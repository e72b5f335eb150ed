"""A folded model has no norm left: none among its modules, and none in what a forward pass computes."""
import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmunorm import fuse_norms

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


@pytest.mark.parametrize('make, norms, bias, size, padded', [
    # The linear layers that get a bias: that of the patch merging, whose input is strided; qkv.
    (models.swin_classifier, 11, {'add': 1}, (32, 32), (37, 53)),
    (models.detector, 12, {'add': 1}, (64, 64), (68, 76)),
    (models.t2t_classifier, 9, {'mm': -2, 'addmm': 2}, (64, 64), None),
])
def test_nothing_is_left_of_the_norms(make, norms, bias, size, padded):
    model = make().eval()
    norm_free = copy.deepcopy(model)
    for name in models.norms(model):
        parent, _, child = name.rpartition('.')
        setattr(norm_free.get_submodule(parent), child, nn.Identity())
    expected = operators(norm_free, size)
    assert difference(operators(model, size), expected)['rsqrt'] == norms  # the trace can see what the norms compute
    assert len(fuse_norms(model, strict=True).folded) == norms and not models.norms(model)
    assert difference(operators(model, size), expected) == bias
    if padded:  # each of 4 blocks pads, and writes the fill to the lower rows and to the right columns; after that
        # the stock method pads by nothing, which copies
        assert difference(operators(model, padded), operators(norm_free, padded)) == {
            **bias, 'constant_pad_nd': 4, 'copy_': 2 * 4}
