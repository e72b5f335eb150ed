"""Ranges of attention in a LiteRT file, found by the operators around its products and softmaxes.

The names of tensors do not tell: the converter names the reshape of a factor like the product itself.
"""
from __future__ import annotations

from collections import defaultdict

import numpy as np

from .ranges import Ranges
from .tflite import kind_of

# Operators whose output has the range of their input; the quantizer copies it.
SAME_RANGE = ('RESHAPE', 'SLICE', 'SPLIT', 'STRIDED_SLICE', 'TRANSPOSE')
CUT = -50  # what a mask adds to scores that it cuts is below
NO_SCORE = 8  # `exp(-8)` is 0 in 8 bits


def fit_attention(model, graph, ranges: Ranges) -> None:
    """Changes a floating-point graph and the calibrated ranges `min` and `max` of its tensors, for attention.

    - The second factor of a product of two activations (keys, values) gets a symmetric range. With another zero point
      than 0, LiteRT's reference kernel computes the product instead of XNNPACK, which took 40 % of a Swin-T's time.
    - The mask of shifted windows lowers scores to `NO_SCORE` below all others, instead of by 1000: with a range from
      -1000, the step size of the scores would be 4.
    """
    maker = {output: operator for operator in graph.operators for output in operator.outputs}

    def range_of(tensor: int) -> dict[str, np.ndarray] | None:
        return ranges.get(graph.tensors[tensor].name.decode())

    def source(tensor: int) -> int:
        """The tensor that has the same values before views."""
        while tensor in maker and kind_of(model, maker[tensor]) in SAME_RANGE:
            tensor = maker[tensor].inputs[0]
        return tensor

    sums = defaultdict(list)  # ranges of scores and of their sums by what is added, which equal blocks share
    for operator in graph.operators:
        kind = kind_of(model, operator)
        if kind == 'BATCH_MATMUL' and (limits := range_of(source(operator.inputs[1]))):
            largest = np.maximum(-limits['min'], limits['max'])
            limits.update(min=-largest * 128 / 127, max=largest)
        elif kind == 'SOFTMAX':
            added = maker.get(total := source(operator.inputs[0]))
            if added and kind_of(model, added) == 'ADD' and (scores := range_of(added.inputs[0])):
                sums[graph.tensors[added.inputs[1]].buffer].append((scores, range_of(total)))
    for buffer, attentions in sums.items():
        data = model.buffers[buffer].data
        constant = np.frombuffer(b'' if data is None else bytes(data), np.float32).copy()
        is_cut = constant < CUT
        if is_cut.any():
            floor = constant[~is_cut].min() - NO_SCORE
            constant[is_cut] = min(scores['min'].min() + floor - scores['max'].max() for scores, _ in attentions)
            model.buffers[buffer].data = constant.view(np.uint8)
            for scores, total in attentions:
                total.update(min=np.full_like(total['min'], scores['min'].min() + floor))
