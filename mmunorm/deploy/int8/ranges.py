"""Ranges of the tensors of a LiteRT file in INT8: from the extremes of each tensor in some runs, by a chosen statistic.

LiteRT's own calibrator takes moving averages over the runs, so that their order matters.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from .tflite import kind_of, read

Runs = dict[str, list[dict[str, np.ndarray]]]  # the inputs of each signature of a file, by name
Ranges = dict[str, dict[str, np.ndarray]]  # `min` and `max` of tensors by name
CHOICES: dict[str, tuple[Callable, Callable]] = {
    'least to greatest value': (np.min, np.max),
    'all but the extremes of 3 % of images': (partial(np.quantile, q=0.03), partial(np.quantile, q=0.97)),
    'mean over images': (np.mean, np.mean),
}
_FLOAT = 0  # of the schema's TensorType


class Extremes:
    """The least and the greatest value of each computed tensor in each run of a floating-point file."""

    def __init__(self, path: Path, data: Runs):
        from ai_edge_litert.interpreter import Interpreter
        interpreter = Interpreter(str(path), experimental_preserve_all_tensors=True)
        interpreter.allocate_tensors()
        self._found: dict[str, np.ndarray] = {}  # (runs, 2, 1, ...) of each tensor, by name, of its rank
        file = read(path)
        subgraphs = {signature.signatureKey.decode(): signature.subgraphIndex for signature in file.signatureDefs}
        for signature, runs in data.items():
            index = subgraphs[signature]
            graph, run = file.subgraphs[index], interpreter.get_signature_runner(signature)
            computed = {tensor for operator in graph.operators for tensor in operator.outputs}
            rows = {tensor: [] for tensor in {*computed, *graph.inputs} if graph.tensors[tensor].type == _FLOAT}
            for inputs in runs:
                run(**inputs)
                for tensor, extremes in rows.items():
                    values = interpreter.get_tensor(tensor, index)
                    extremes.append([values.min(keepdims=True), values.max(keepdims=True)])
            self._found |= {graph.tensors[tensor].name.decode(): np.array(extremes)
                            for tensor, extremes in rows.items()}

    def ranges(self, choice: str, half: int | None = None) -> Ranges:
        """`min` and `max` of each tensor, float32 of one element, by a statistic of `CHOICES` over the runs.

        Of several runs, only those of an even number for `half` 0, of an odd number for 1.
        """
        least, greatest = CHOICES[choice]
        found = {}
        for name, rows in self._found.items():
            kept = rows if half is None or len(rows) == 1 else rows[half::2]
            found[name] = dict(min=least(kept[:, 0], axis=0).astype(np.float32),
                               max=greatest(kept[:, 1], axis=0).astype(np.float32))
        return found


def fit_padding(model, graph, ranges: Ranges) -> None:
    """Replaces -inf, with which a maximum pooling pads, by the least value of its input: infinity has no step size."""
    least = defaultdict(float)  # by buffer, which several poolings share
    for operator in graph.operators:
        if kind_of(model, operator) != 'PADV2':
            continue
        before, after = (graph.tensors[tensor].name.decode() for tensor in (operator.inputs[0], operator.outputs[0]))
        buffer = graph.tensors[operator.inputs[2]].buffer
        if before in ranges and np.isneginf(np.frombuffer(bytes(model.buffers[buffer].data), np.float32)).all():
            ranges[after] = ranges[before]
            least[buffer] = min(least[buffer], ranges[before]['min'].min())
    for buffer, value in least.items():
        model.buffers[buffer].data = np.float32([value]).view(np.uint8)
