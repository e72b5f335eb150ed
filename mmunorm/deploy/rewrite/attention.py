"""Attention for 8 bits: keys and values without their mean over the tokens.

A softmax does not see what is added to all scores of a row, and its rows sum to 1. So this is the same function:

    softmax(q (k - mean(k))^T) (v - mean(v)) + mean(v)

In integers, a softmax has a step of 1/256, which some hundred tokens share, and the rounded rows do not sum to 1. What
they lack now takes the mean of the values in place of 0. The scores, which have one range for all heads, get smaller.
With few tokens, as in the windows of a Swin, a probability has several steps, and attention stays as it is.
"""
from __future__ import annotations

import torch
from torch import fx

from .operators import COPIES, VIEWS, Editor

aten = torch.ops.aten
MANY = 100  # tokens
PRODUCTS = (aten.matmul.default, aten.bmm.default)
SOFTMAXES = (aten.softmax.int, aten._softmax.default)


@torch.no_grad()
def center_attention(module: fx.GraphModule, least: int = MANY) -> int:
    """Centers the keys and values of attentions over at least so many tokens in a graph of torch.export, in place.

    Returns:
        int: the number of these attentions.
    """
    editor, number = Editor(module), 0
    for node in list(module.graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default:
            out, keys = node, (node, 1, -2)
        elif node.target in SOFTMAXES and node.args[1] in (-1, node.meta['val'].dim() - 1) and (
                out := _reader(node)) and (product := _scores(node.args[0], node)):
            keys = (product, 1, -1)
        else:
            continue
        values = 2 if out is node else 1
        if out.args[values].meta['val'].shape[-2] < least:
            continue
        _center(editor, *keys)
        mean = _center(editor, out, values, -2)
        with module.graph.inserting_after(out):
            added = module.graph.call_function(aten.add.Tensor, (out, mean))
        added.meta.update(val=out.meta['val'], nn_module_stack=out.meta.get('nn_module_stack', {}))
        out.replace_all_uses_with(added, lambda user, added=added: user is not added)
        number += 1
    module.graph.lint()
    module.recompile()
    return number


def _reader(node: fx.Node) -> fx.Node | None:
    """The product of the probabilities with the values."""
    while len(node.users) == 1:
        user, = node.users
        if user.target in PRODUCTS:
            return user if user.args[0] is node and user.args[1] is not node else None
        if user.target not in COPIES:
            break
        node = user
    return None


def _scores(node, reader: fx.Node) -> fx.Node | None:
    """The product of queries and keys, if the softmax sees of its rows nothing but the differences."""
    if not isinstance(node, fx.Node) or list(node.users) != [reader]:
        return None
    if node.target in PRODUCTS:
        return node
    first, *others = node.args or (None, )
    if node.target is aten.add.Tensor:
        return _scores(first, node) or _scores(others[0], node)
    is_factor = node.target in (aten.mul.Tensor, aten.div.Tensor) and not isinstance(others[0], fx.Node)
    is_view = node.target in VIEWS and first.meta['val'].shape[-1] == node.meta['val'].shape[-1]
    return _scores(first, node) if is_factor or is_view or node.target in COPIES else None


def _center(editor: Editor, at: fx.Node, index: int, dim: int) -> fx.Node:
    """Subtracts the mean over an axis, -1 or -2, from an argument of a node; returns the mean."""
    before = at.args[index]
    axes = before.meta['val'].dim()
    last = axes - 1
    if before.target is aten.permute.default:
        swaps = [axis % axes for axis in before.args[1]][-2:] == [last, last - 1]
    else:
        swaps = before.target is aten.transpose.int and {axis % axes for axis in before.args[1:]} == {last, last - 1}
    if swaps and len(before.users) == 1:
        at, index, dim = before, 0, -3 - dim  # before it, as LiteRT's product transposes its second factor by itself
    x = at.args[index]
    mean = editor.emit(at, aten.mean.dim, x, [dim], True)
    at.update_arg(index, editor.emit(at, aten.sub.Tensor, x, mean))
    return mean
