"""ExecuTorch files, `.pte`, with the XNNPACK backend."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from ..graph import Exportable, exporting
from ..rewrite.norms import by_single_operators
from ..rewrite.operators import for_chips
from ..rewrite.pixels import fold_pixels
from .base import EDGE_INSTALL, KEY, Batches, Format, Session, Variant, register_format, silent, stage


class ExecuTorchSession(Session):
    """Its Python runtime chooses the number of threads."""

    def __init__(self, path: Path, threads: int | None = None):
        from executorch.runtime import Runtime
        with silent():  # it prints which CPU files it cannot find
            program = Runtime.get().load_program(path)
            self.meta = json.loads(program.load_method(KEY).execute([])[0]) if KEY in program.method_names else None
            self._method = program.load_method('forward')
        self._program = program  # it owns the memory of the method

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [out.numpy().copy() for out in self._method.execute(list(map(torch.from_numpy, arrays)))]


@register_format
class ExecuTorch(Format):
    name, suffixes, runtime, session = 'executorch', ('.pte', ), 'ExecuTorch', ExecuTorchSession
    packages = run_packages = ('executorch', )
    int8_kinds, int8_packages = ('static', ), ('torchao', )
    install, tasks, takes_half, takes_dynamic = EDGE_INSTALL, ('classifier', 'tensors'), False, False
    variants = {'executorch': Variant(runtime), 'executorch-int8': Variant(f'{runtime} INT8', 'static')}

    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Batches = ()) -> None:
        if int8:
            stage(f'calibrating on {len(samples)} batches, quantizing')
        with silent():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower
            with exporting():
                graph = fold_pixels(by_single_operators(model.graph), *model.inputs)
                graph = for_chips(torch.export.export(graph, model.inputs, strict=False))
                program = torch.export.export(graph, model.inputs, strict=False)
                if int8:
                    graph = quantize_graph(program.module(), samples)
                    program = torch.export.export(graph, model.inputs, strict=False)
            edge = to_edge_transform_and_lower(
                program, partitioner=[XnnpackPartitioner()], constant_methods={KEY: json.dumps(model.meta)})
            path.write_bytes(edge.to_executorch().buffer)


def quantize_graph(graph: torch.fx.GraphModule, samples: Batches) -> torch.fx.GraphModule:
    """Quantizes a graph to INT8 with ExecuTorch's XNNPACK quantizer: per-channel weights, per-tensor activations.

    The `graph` is also changed. Attention scores stay in floating point, like the matrix product before them and the
    softmax after them: the mask of shifted windows is -1000, so the step size in 8 bits would be 4.
    """
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    quantizer.set_filter_function(lambda node: not _makes_scores(node))
    prepared = prepare_pt2e(graph, quantizer)
    with torch.no_grad():
        for arrays in samples:
            prepared(*map(torch.from_numpy, arrays))
    return convert_pt2e(prepared)


def _makes_scores(node: torch.fx.Node) -> bool:
    """Whether a node is an addition before a softmax."""
    return node.target == torch.ops.aten.add.Tensor and any(
        user.target == torch.ops.aten.softmax.int or _makes_scores(user) for user in node.users)
