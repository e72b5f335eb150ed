"""INT8 with NNCF for OpenVINO, and the kernels that OpenVINO makes of a graph."""
from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def quantize(model, inputs: Sequence[tuple[np.ndarray, ...]]):
    """An `openvino.Model` in INT8.

    SmoothQuant is off: on the digits Swin it cost 5 dB. Weights have 7 of their 8 bits: with all 8, CPUs that lack
    VNNI clip the sums of two products, which cost 13 dB there (docs/deployment.md).

    Args:
        model (openvino.Model): in floating point; unchanged.
        inputs: batches of the model's inputs.
    """
    import nncf
    nncf.set_log_level(logging.ERROR)
    return nncf.quantize(
        model, nncf.Dataset(inputs), subset_size=len(inputs), model_type=nncf.ModelType.TRANSFORMER,
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            overflow_fix=nncf.OverflowFix.ENABLE,
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1., convolution=-1.)))


@dataclass(frozen=True)
class Kernel:
    """One thing that OpenVINO executes, by its own account.

    Attributes:
        kind: such as 'FullyConnected', 'Subgraph' (elementwise operations) or 'MVN' (a normalization).
        precision: such as 'f32', 'u8'.
        nodes: names of the graph's nodes that are in it.
    """
    kind: str
    precision: str
    nodes: tuple[str, ...]

    @property
    def is_int8(self) -> bool:
        """Whether it computes with 8 bits."""
        return self.precision in ('i8', 'u8')


def kernels(compiled) -> list[Kernel]:
    """What an `openvino.CompiledModel` executes."""
    def text(op, key: str) -> str:
        info = op.get_rt_info()
        return info[key].astype(str) if key in info else ''

    keys = ('layerType', 'runtimePrecision', 'originalLayersNames')
    found = ([text(op, key) for key in keys] for op in compiled.get_runtime_model().get_ops())
    return [Kernel(kind, precision, tuple(nodes.split(','))) for kind, precision, nodes in found]
