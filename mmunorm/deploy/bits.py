"""Where full-integer INT8 loses accuracy: fake quantization in torch, one kind of tensor or one block at a time.

Each tensor that a LiteRT file stores is rounded to one of 256 steps of its range, by the best of the statistics that a
file has the choice of. Operators that only move values keep the steps of their input.
"""
from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from .attention import PRODUCTS, SOFTMAXES
from .layouts import COPIES, VIEWS, Editor
from .ranges import CHOICES

aten = torch.ops.aten
_MOVES = VIEWS | COPIES | {
    aten.permute.default, aten.transpose.int, aten.select.int, aten.slice.Tensor, aten.expand.default, aten.unbind.int,
    aten.split.Tensor, aten.chunk.default, aten.roll.default, aten.pad.default, aten.constant_pad_nd.default,
    aten.amax.default, aten.max_pool2d.default, operator.getitem}
_LAYERS = {aten.linear.default, aten.conv2d.default, aten.convolution.default}
_KINDS = {
    'linear layers': _LAYERS, 'softmax': set(SOFTMAXES), 'attention': set(PRODUCTS),
    'activation functions': {aten.gelu.default, aten.relu.default, aten.silu.default, aten.sigmoid.default,
                             aten.hardswish.default, aten.tanh.default}}
_STATISTICS = {aten.mean.dim, aten.rsqrt.default, aten.square.default, aten.pow.Tensor_Scalar}
_WEIGHTS = 'weights'  # and other constants
_CUT = -50  # what a mask adds to scores that it cuts is below; `fit_attention` lowers them to 8 below all others
_FUSED = 'is within an operator'  # of a node whose values no file stores
FOLDING = "fold and rotate the model first, if it is not: fuse_norms(model, example=images, rotate='hadamard')"
IN_FLOAT = "activations stay in floating point with int8='dynamic'"
MORE_IMAGES = 'give more calibration images of the kind that the model will get'
_ADVICE = {'norms': FOLDING, 'residual stream': FOLDING}


@dataclass(frozen=True)
class Bits:
    """SNR in dB of a model's outputs if only these tensors have 8 bits.

    Attributes:
        kinds, blocks: by the kind of a tensor, and by the block of layers that computes it.
        everything (float): if all of them have.
    """
    kinds: dict[str, float]
    blocks: dict[str, float]
    everything: float

    def lines(self) -> list[str]:
        """A report, of the lowest SNR first, and what helps."""
        worst = min(self.kinds, key=self.kinds.__getitem__)
        return [f'SNR in 8 bits by simulation: {self.everything:.1f} dB; of one kind of tensor alone: '
                + _lowest(self.kinds), *([f'of one block alone: {_lowest(self.blocks)}'] if self.blocks else []),
                f'if that is too little: {_ADVICE.get(worst, MORE_IMAGES)}; {IN_FLOAT}']


def _lowest(snr: dict[str, float], number: int = 6) -> str:
    return ', '.join(f'{name} {value:.1f}' for name, value in sorted(snr.items(), key=lambda item: item[1])[:number])


@torch.no_grad()
def where_bits_go(module: fx.GraphModule, images: Sequence[Tensor], held_out: Sequence[Tensor],
                  are_logits: bool = False) -> Bits:
    """Simulates a full-integer file of a graph.

    Args:
        module (fx.GraphModule): the result of :func:`.layouts.for_chips`; its norms are written out, in place.
        images: inputs that the ranges are taken from.
        held_out: inputs that the SNR is taken from.
        are_logits (bool): whether the outputs are logits, of which the differences between classes count.
    """
    write_norms_out(module)
    run = _FakeQuantized(module)

    def outputs(x: Tensor) -> list[Tensor]:
        return [out - out.mean(-1, keepdim=True) if are_logits else out for out in run.outputs(x)]

    for x in images:
        run.outputs(x)
    run.active = set()
    exact = [outputs(x) for x in held_out]

    def snr(active) -> float:
        run.active = set(active)
        noise = sum(float((got - true).square().sum()) for x, truth in zip(held_out, exact, strict=True)
                    for got, true in zip(outputs(x), truth, strict=True))
        signal = sum(float(true.square().sum()) for truth in exact for true in truth)
        return 10 * math.log10(signal / noise) if noise and signal else math.inf

    kinds, blocks = defaultdict(set), defaultdict(set)
    for node, kind in run.kinds.items():
        kinds[kind].add(node)
        blocks[_block_of(node)].add(node)
    kinds[_WEIGHTS] = {_WEIGHTS}
    blocks.pop('', None)
    everything = {}
    for choice in CHOICES:
        run.set_ranges(choice)
        everything[choice] = snr({*run.kinds, _WEIGHTS})
    best = max(everything, key=everything.__getitem__)
    run.set_ranges(best)
    return Bits({kind: snr(nodes) for kind, nodes in kinds.items()},
                {block: snr(nodes) for block, nodes in blocks.items()} if len(blocks) > 1 else {}, everything[best])


class _FakeQuantized(fx.Interpreter):
    """Runs a graph with its `active` nodes in 8 bits; while that is None, it records the extremes of all."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.active: set | None = None
        self.kinds = {node: kind for node in module.graph.nodes if (kind := _kind_of(node))}
        self._extremes: dict[fx.Node, list[tuple[float, float]]] = defaultdict(list)
        self._ranges: dict[fx.Node, tuple[float, float]] = {}
        # The second factors of products, whose zero point is 0.
        self._symmetric = {_source(node.args[1]) for node in module.graph.nodes if node.target in PRODUCTS}
        constant = Editor(module).value
        self._masks = {node: mask[mask > _CUT].min() for node in module.graph.nodes
                       if node.target is aten.add.Tensor and (mask := constant(node.args[1])) is not None
                       and mask.is_floating_point() and mask.numel() and mask.min() < _CUT < mask.max()}
        self._constants = {node for node in module.graph.nodes if node.op == 'get_attr'
                           and all(user.target not in _LAYERS and user not in self._masks for user in node.users)}

    def outputs(self, images: Tensor) -> list[Tensor]:
        """The output tensors in float64."""
        out = self.run(images)
        return [value.double() for value in (out.values() if isinstance(out, dict) else [out] if isinstance(
            out, Tensor) else out)]

    def set_ranges(self, choice: str) -> None:
        """Takes the ranges of all tensors from what was recorded, by a statistic of `ranges.CHOICES`."""
        least, greatest = CHOICES[choice]
        for node, extremes in self._extremes.items():
            lows, highs = np.array(extremes).T
            self._ranges[node] = min(float(least(lows)), 0.), max(float(greatest(highs)), 0.)

    def call_function(self, target, args, kwargs):
        if target in _LAYERS and self.active and _WEIGHTS in self.active:
            args = (args[0], _rounded_rows(args[1]), *args[2:])
        return super().call_function(target, args, kwargs)

    def run_node(self, node: fx.Node):
        out = super().run_node(node)
        if self.active is None and node in self.kinds:
            low, high = (float(value) for value in out.aminmax())
            if node in self._masks:
                low = float(self.env[node.args[0]].min() + self._masks[node]) - 8
            self._extremes[node].append((low, high))
        if not self.active:
            return out
        if node in self._constants and _WEIGHTS in self.active and out.is_floating_point() and out.numel():
            return _rounded(out, min(float(out.min()), 0.), max(float(out.max()), 0.))
        return _rounded(out, *self._range_of(node)) if node in self.active else out

    def _range_of(self, node: fx.Node) -> tuple[float, float]:
        low, high = self._ranges[node]
        if node.target in SOFTMAXES:
            return 0., 255 / 256
        if node in self._symmetric:
            high = max(-low, high)
            return -high * 128 / 127, high
        return low, high


def _rounded(x: Tensor, low: float, high: float) -> Tensor:
    """Values in 256 steps of a range."""
    step = (high - low) / 255 or 1.
    zero = round(-low / step)
    return (x / step).round_().clamp_(-zero, 255 - zero).mul_(step)


def _rounded_rows(weight: Tensor) -> Tensor:
    """A weight with 8 bits and a step for each output."""
    step = weight.flatten(1).abs().amax(1).clamp(min=1e-12).view(-1, *[1] * (weight.dim() - 1)) / 127
    return (weight / step).round_().mul_(step)


def _source(node: fx.Node) -> fx.Node:
    while node.target in _MOVES:
        node = node.args[0]
    return node


def _kind_of(node: fx.Node) -> str | None:
    """The kind of a computed tensor; None if it has the values of another."""
    value = node.meta.get('val')
    if node.op != 'call_function' or node.target in _MOVES or _FUSED in node.meta or not (
            isinstance(value, Tensor) and value.is_floating_point()):
        return None
    for kind, targets in _KINDS.items():
        if node.target in targets:
            return kind
    owner = _module_of(node)[1].lower()
    if 'attention' in owner or 'msa' in owner:
        return 'attention'
    if 'norm' in owner or owner == 'tokenscale' or any(
            other.target in _STATISTICS for other in (node, *node.all_input_nodes)):
        return 'norms'
    return 'residual stream' if node.target in (aten.add.Tensor, aten.cat.default) else 'others'


def _module_of(node: fx.Node) -> tuple[str, str]:
    """The path and the class of the innermost module that computes a node."""
    path, kind = next(reversed(node.meta.get('nn_module_stack', {}).values()), ('', ''))
    return path, (kind if isinstance(kind, str) else kind.__name__).rpartition('.')[2]


def _block_of(node: fx.Node) -> str:
    """The first numbered part of the path of the module that computes a node, such as `blocks.3`."""
    found = re.search(r'[a-z_]\w*\.\d+(\.[a-z_]\w*\.\d+)?', _module_of(node)[0])
    return found[0] if found else ''


@torch.no_grad()
def write_norms_out(module: fx.GraphModule) -> None:
    """Replaces LayerNorm and RMSNorm by the operators that LiteRT's converter makes of them, in place."""
    editor = Editor(module)
    for node in list(module.graph.nodes):
        if node.target not in (aten.layer_norm.default, aten.rms_norm.default):
            continue
        is_layer_norm = node.target is aten.layer_norm.default
        x, shape, weight, *rest = (*node.args, None, None, None)[:5]
        bias, eps = rest if is_layer_norm else (None, rest[0])
        if eps is None:
            eps = 1e-5 if is_layer_norm else torch.finfo(torch.float32).eps
        dims = list(range(-len(shape), 0))
        mean = editor.emit(node, aten.mean.dim, x, dims, True) if is_layer_norm else None
        difference = x
        if mean is not None:
            difference = editor.emit(node, aten.sub.Tensor, x, mean)
            difference.meta[_FUSED] = True  # SQUARED_DIFFERENCE
        variance = editor.emit(node, aten.mean.dim, editor.emit(node, aten.square.default, difference), dims, True)
        scale = editor.emit(node, aten.rsqrt.default, editor.emit(node, aten.add.Tensor, variance, eps))
        x = editor.emit(node, aten.mul.Tensor, x, scale)
        if mean is not None:
            x = editor.emit(node, aten.sub.Tensor, x, editor.emit(node, aten.mul.Tensor, mean, scale))
        for target, parameter in (aten.mul.Tensor, weight), (aten.add.Tensor, bias):
            x = x if parameter is None else editor.emit(node, target, x, parameter)
        node.replace_all_uses_with(x)
        module.graph.erase_node(node)
    module.recompile()
