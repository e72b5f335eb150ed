"""Rewrites the operators of any torch model for edge devices."""
from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

aten = torch.ops.aten
LOWEST = -1000.  # is added to scores that a mask cuts; their softmax is 0, and no NaN
MANY = 100  # tokens; with fewer, as in the windows of a Swin, a probability has several of the 256 steps of 8 bits
# Operators that return their first argument in another shape.
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
         aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints, aten.unflatten.int}
# Operators that return their first argument.
COPIES = {aten.alias.default, aten.clone.default, aten.detach.default, aten.contiguous.default,
          aten.dropout.default, aten._to_copy.default}


@torch.no_grad()
def for_chips(program: torch.export.ExportedProgram, centers: bool = False) -> fx.GraphModule:
    """Rewrites the graph of a program with static shapes, without changing the function.

    If it `centers`, so does :func:`center_attention`.
    """
    module = program.run_decompositions({}).module()
    for node in module.graph.nodes:
        if isinstance(value := node.meta.get('val'), Tensor):
            node.meta['val'] = torch.empty(value.shape, dtype=value.dtype, device='meta')
    rewriter = _Rewriter(module)
    rewriter.apply(rewriter.fold_constant)
    if centers:
        center_attention(module)
    rewriter.apply(rewriter.simplify, rewriter.decompose, rewriter.select, rewriter.merge_dimensions, rewriter.scale,
                   rewriter.shorten)
    used = {node.target for node in module.graph.nodes if node.op == 'get_attr'}
    for name in [name for name, _ in module.named_buffers(recurse=False) if name not in used]:
        delattr(module, name)
    module.graph.lint()
    module.recompile()
    return module


@torch.no_grad()
def center_attention(module: fx.GraphModule, least: int = MANY) -> fx.GraphModule:
    """Centers the keys and values of attention over at least so many tokens, in place; returns the graph.

        softmax(q (k - mean(k))^T) (v - mean(v)) + mean(v)

    This is the same function: a softmax does not see what is added to all scores of a row, and its rows sum to 1. In
    8 bits the rounded rows do not. What they lack now takes the mean of the values in place of 0. The scores, which
    have one range for all heads, get smaller. A row that its mask allows nothing is 0, so only constant masks without
    such a row are taken.
    """
    editor = Editor(module)
    for node in list(module.graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default or node.kwargs.get('enable_gqa') or (
                node.args[2].meta['val'].shape[-2] < least):
            continue
        if (mask := (*node.args, None)[3]) is not None and (
                (value := editor.value(mask)) is None or _as_bias(value)[1] is not None):
            continue
        for index in (1, 2):
            x = node.args[index]
            mean = editor.emit(node, aten.mean.dim, x, [-2], True)
            node.update_arg(index, editor.emit(node, aten.sub.Tensor, x, mean))
        with module.graph.inserting_after(node):
            added = module.graph.call_function(aten.add.Tensor, (node, mean))
        added.meta.update(node.meta)
        node.replace_all_uses_with(added, lambda user, added=added: user is not added)
    module.recompile()
    return module


class Editor:
    """Adds nodes to a graph of torch.export, each with its output as `meta['val']`."""

    def __init__(self, module: fx.GraphModule):
        self.module, self.graph = module, module.graph

    def emit(self, at: fx.Node, target: Callable, *args) -> fx.Node:
        with self.graph.inserting_before(at):
            node = self.graph.call_function(target, args)
        node.meta['val'] = target(*fx.node.map_arg(args, lambda input: input.meta['val']))
        node.meta['nn_module_stack'] = at.meta.get('nn_module_stack', {})
        return node

    def constant(self, at: fx.Node, value: Tensor) -> fx.Node:
        name = next(name for number in itertools.count() if not hasattr(self.module, name := f'constant{number}'))
        self.module.register_buffer(name, value.detach().clone().contiguous())
        with self.graph.inserting_before(at):
            node = self.graph.get_attr(name)
        node.meta['val'] = value.to('meta')
        return node

    def value(self, node) -> Tensor | None:
        """The tensor of a constant node."""
        is_constant = isinstance(node, fx.Node) and node.op == 'get_attr'
        return operator.attrgetter(node.target)(self.module) if is_constant else None


class _Rewriter(Editor):
    """Each method after `apply` returns the replacement of a node, or None."""

    def apply(self, *rewrites: Callable[[fx.Node], fx.Node | None]) -> None:
        for rewrite in rewrites:
            for node in list(self.graph.nodes):
                if node.op == 'call_function' and (new := rewrite(node)) is not None:
                    node.replace_all_uses_with(new)
                    self.graph.erase_node(node)  # attention counts as random and would be kept
            self.graph.eliminate_dead_code()

    def fold_constant(self, node: fx.Node) -> fx.Node | None:
        """Computes what does not depend on the input, such as position biases and attention masks."""
        call = node.args[0] if node.target is operator.getitem else node  # of one tensor of a list
        if node.target is aten._assert_tensor_metadata.default:
            self.graph.erase_node(node)
        elif node.target is aten.new_zeros.default:
            return self.constant(node, torch.zeros(node.meta['val'].shape, dtype=node.meta['val'].dtype))
        elif isinstance(node.meta.get('val'), Tensor) and all(input.op == 'get_attr' for input in call.all_input_nodes):
            args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), self.value)
            result = call.target(*args, **kwargs)
            return self.constant(node, result if call is node else result[node.args[1]])
        return None

    def simplify(self, node: fx.Node) -> fx.Node | None:
        """Canonicalizes reshapes to views and transposes to permutations; removes no-ops."""
        value, first = node.meta.get('val'), node.args[0] if node.args else None
        if not isinstance(value, Tensor) or not isinstance(first, fx.Node):
            return None
        before = first.meta.get('val')
        if node.target in VIEWS:
            return self.emit(node, aten.reshape.default, first, list(value.shape))
        if node.target in COPIES and before.dtype == value.dtype or (
                node.target is aten.pad.default and not any(node.args[1])) or (
                node.target is aten.expand.default and before.shape == value.shape):
            return first
        if node.target is aten.transpose.int:
            order = list(range(value.dim()))
            a, b = (axis % value.dim() for axis in node.args[1:])
            order[a], order[b] = b, a
            return self.emit(node, aten.permute.default, first, order)
        if node.target is operator.getitem and first.target is aten.unbind.int:
            dim = first.args[1] if len(first.args) > 1 else 0
            return self.emit(node, aten.select.int, first.args[0], dim, node.args[1])
        return None

    def decompose(self, node: fx.Node) -> fx.Node | None:
        """Decomposes attention, `nn.Unfold`, writes to a part of a tensor, as of padding, and rolls.

        `nn.Unfold` becomes a depthwise convolution with weights of 0 and 1, in place of a gather. Writes and rolls
        become slices and their concatenation: ExecuTorch quantizes the indices of its own rolls, and in INT8 cannot
        load what writes to a part.
        """
        if node.target is aten.copy.default:  # of its second argument to the place of the first
            source, shape = node.args[1], list(node.meta['val'].shape)
            value = self.value(source)
            return self.emit(node, aten.expand.default, source, shape) if value is None else self.constant(
                node, value.expand(shape))
        if node.target is aten.slice_scatter.default:
            x, part, dim, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 2:])
            size = x.meta['val'].shape[dim]
            start, end, _ = slice(start, end).indices(size)
            if step != 1:
                return None
            before, after = self.head(node, x, dim, start), self.emit(node, aten.slice.Tensor, x, dim, end, size)
            return self.emit(node, aten.cat.default, [side for side in (before, part, after)
                                                      if side.meta['val'].shape[dim]], dim)
        if node.target is aten.im2col.default:
            x, kernel, dilation, padding, stride = node.args
            channels = x.meta['val'].shape[1]
            weight = torch.eye(math.prod(kernel)).view(-1, 1, *kernel).repeat(channels, 1, 1, 1)
            x = self.emit(node, aten.conv2d.default, x, self.constant(node, weight), None, stride, padding, dilation,
                          channels)
            return self.emit(node, aten.reshape.default, x, list(node.meta['val'].shape))
        if node.target is aten.roll.default:
            x, shifts, dims = (*node.args, [])[:3]
            if not dims:  # of all elements in a row
                x, dims = self.emit(node, aten.reshape.default, x, [-1]), [0]
            for by, dim in zip(shifts, dims, strict=True):
                size = x.meta['val'].shape[dim]
                start = -by % size
                if start:
                    x = self.emit(node, aten.cat.default, [self.emit(node, aten.slice.Tensor, x, dim, start, size),
                                                           self.emit(node, aten.slice.Tensor, x, dim, 0, start)], dim)
            return self.emit(node, aten.reshape.default, x, list(node.meta['val'].shape))
        if node.target is not aten.scaled_dot_product_attention.default:
            return None
        q, k, v, mask, _, is_causal = (*node.args, *(None, ) * 6)[:6]
        if is_causal or node.kwargs.get('enable_gqa'):
            return None
        shape, scale = q.meta['val'].shape, node.kwargs.get('scale')
        scale = shape[-1]**-0.5 if scale is None else scale
        last = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        if (query := self.value(q)) is None:
            q = self.emit(node, aten.mul.Tensor, q, scale)
            scores = self.emit(node, aten.matmul.default, q, self.emit(node, aten.permute.default, k, last))
        else:  # as of a pool by attention: LiteRT quantizes only a second factor that is constant
            q = self.constant(node, (query * scale).mT)
            scores = self.emit(node, aten.permute.default, self.emit(node, aten.matmul.default, k, q), last)
        is_allowed = None
        if mask is not None:
            if (value := self.value(mask)) is not None:
                bias, is_allowed = _as_bias(value)
                mask = self.constant(node, bias)
            elif mask.meta['val'].dtype == torch.bool:
                return None
            scores = self.emit(node, aten.add.Tensor, scores, mask)
        out = self.emit(node, aten.matmul.default, self.emit(node, aten.softmax.int, scores, -1), v)
        return out if is_allowed is None else self.emit(node, aten.mul.Tensor, out, self.constant(node, is_allowed))

    def head(self, at: fx.Node, x: fx.Node, dim: int, end: int) -> fx.Node:
        """The first `end` entries along a dimension; a padding that they leave out is not made."""
        last = 2 * (x.meta['val'].dim() - 1 - dim) + 1  # in the padding of all dimensions, from the last one
        if x.target is aten.pad.default and end == x.args[0].meta['val'].shape[dim] and not x.args[1][last - 1]:
            padding = [*x.args[1][:last], 0, *x.args[1][last + 1:]]
            return self.emit(at, aten.pad.default, x.args[0], padding, *x.args[2:]) if any(padding) else x.args[0]
        return self.emit(at, aten.slice.Tensor, x, dim, 0, end)

    def source(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """The source of a node before views and permutations, and these, in order."""
        views = []
        while node.target in (aten.reshape.default, aten.permute.default, aten.select.int):
            views.insert(0, node)
            node = node.args[0]
        return node, views

    def is_layer(self, node: fx.Node) -> bool:
        """Whether a node is a linear layer with constant weights."""
        return node.target is aten.linear.default and all(
            parameter is None or self.value(parameter) is not None for parameter in node.args[1:])

    def select(self, node: fx.Node) -> fx.Node | None:
        """Turns a slice of a linear layer's output, such as the queries, into a layer with its own range in INT8."""
        if node.target is not aten.select.int:
            return None
        layer, views = self.source(node)
        if not self.is_layer(layer):
            return None
        shape = layer.meta['val'].shape
        index = torch.arange(math.prod(shape)).view(shape)
        for view in views:
            index = view.target(index, *view.args[1:])
        rows, channels = index // shape[-1], index % shape[-1]
        first, number = int(channels.min()), int(channels.max() - channels.min()) + 1
        index = rows * number + channels - first
        sides = [side for side in index.shape if side > 1]
        steps = index.view(sides)
        strides = [int(steps.select(axis, 1).flatten()[0] - steps.flatten()[0]) for axis in range(len(sides))]
        order = sorted(range(len(sides)), key=lambda axis: -strides[axis])
        output = torch.arange(math.prod(sides)).view([sides[axis] for axis in order])
        back = [order.index(axis) for axis in range(len(sides))]
        if number * math.prod(shape[:-1]) != index.numel() or not torch.equal(output.permute(back), steps):
            return None
        x, weight, bias = (*layer.args, None)[:3]
        parts = [parameter if parameter is None else self.constant(node, self.value(parameter)[first:first + number])
                 for parameter in (weight, bias)]
        x = self.emit(node, aten.linear.default, x, *parts)
        lead = [1] * (index.shape[0] == 1)  # of one image: Sophgo's compiler stops at attention without it
        x = self.emit(node, aten.reshape.default, x, [*lead, *output.shape])
        x = self.emit(node, aten.permute.default, x, [*range(len(lead)), *(len(lead) + axis for axis in back)])
        return self.emit(node, aten.reshape.default, x, list(index.shape))

    def merge_dimensions(self, node: fx.Node) -> fx.Node | None:
        """Rewrites a permutation, as of windows, or a sum with a constant, in at most four dimensions."""
        value = node.meta.get('val')
        if not isinstance(value, Tensor) or value.dim() <= 4:
            return None
        if node.target is aten.permute.default:
            sides, order = node.args[0].meta['val'].shape, node.args[1]
            order = [axis % value.dim() for axis in order]
            groups: list[list[int]] = []
            for axis in (axis for axis in order if sides[axis] > 1):
                before = groups and groups[-1][-1]
                if groups and before < axis and math.prod(sides[before + 1:axis]) == 1:
                    groups[-1].append(axis)
                else:
                    groups.append([axis])
            old = sorted(groups)
            x = self.emit(node, aten.reshape.default, node.args[0],
                          [math.prod(sides[axis] for axis in group) for group in old])
            x = self.emit(node, aten.permute.default, x, [old.index(group) for group in groups])
            return self.emit(node, aten.reshape.default, x, list(value.shape))
        if node.target is aten.add.Tensor and not node.kwargs and node.args[0].meta['val'].shape == value.shape and (
                constant := self.value(node.args[1])) is not None:
            merged = value.dim() - 3
            lead = value.shape[:merged]
            constant = constant[(None, ) * (value.dim() - constant.dim())]
            constant = constant.expand(*lead, *constant.shape[merged:]).flatten(0, merged - 1)
            x = self.emit(node, aten.reshape.default, node.args[0], [math.prod(lead), *value.shape[merged:]])
            x = self.emit(node, aten.add.Tensor, x, self.constant(node, constant))
            return self.emit(node, aten.reshape.default, x, list(value.shape))
        return None

    def scale(self, node: fx.Node) -> fx.Node | None:
        """Folds a factor of a linear layer's output, such as the scale of queries, into its weights."""
        if node.target is not aten.mul.Tensor:
            return None
        factor = node.args[1]
        if isinstance(factor, fx.Node):
            value = self.value(factor)
            factor = value.squeeze() if value is not None and value.numel() == 1 else None
        layer, views = self.source(node.args[0])
        if factor is None or not self.is_layer(layer) or any(
                len(between.users) > 1 for between in (layer, *views)) or (
                node.args[0].meta['val'].shape != node.meta['val'].shape):
            return None
        x, *parameters = layer.args
        scaled = [parameter if parameter is None else self.constant(layer, self.value(parameter) * factor)
                  for parameter in parameters]
        layer.replace_all_uses_with(self.emit(layer, aten.linear.default, x, *scaled))
        return node.args[0]

    def shorten(self, node: fx.Node) -> fx.Node | None:
        """Merges consecutive views."""
        if node.target is not aten.reshape.default:
            return None
        x = node.args[0]
        while x.target is aten.reshape.default:
            x = x.args[0]
        shape = list(node.meta['val'].shape)
        if list(x.meta['val'].shape) == shape:
            return x
        return None if x is node.args[0] else self.emit(node, aten.reshape.default, x, shape)


def _as_bias(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A mask of attention as what is added to its scores, in a range for INT8; and 0 for rows that allow nothing.

    The second is `(..., rows, 1)`, or None if there is no such row.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0., -math.inf)
    largest = mask.amax(-1, keepdim=True)
    is_allowed = (largest > -math.inf).to(mask.dtype)
    # A row of equal finite values, however low, allows everything.
    bias = torch.where((largest > LOWEST) | (is_allowed == 0), mask.clamp(min=LOWEST), mask)
    return bias, None if is_allowed.all() else is_allowed
