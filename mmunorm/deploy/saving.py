"""Writes a traced model as a file for a runtime, and runs that file once."""
from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .differences import Differences, differences
from .export import Traced
from .formats import Format
from .runner import KEY, Runner

LARGEST_HALF = 65504.


@dataclass(frozen=True)
class Exported:
    """What :func:`save` has made.

    Attributes:
        path: the file.
        size: bytes on the disk.
        norms: number of norms left in the model.
        difference: to torch, for pictures of noise.
    """
    path: Path
    size: int
    norms: int
    difference: Differences


def save(traced: Traced, chosen: Format, path: str | Path, half: bool = False,
         samples: Sequence[tuple[np.ndarray, ...]] | None = None) -> Exported:
    """Writes a graph as a file for a runtime, runs it there and compares it with torch.

    Args:
        traced (Traced): what :func:`trace` gives.
        chosen (Format): what :func:`find_format` gives.
        path: of the file, with the suffix of the format.
        half (bool): weights in float16. Defaults to False.
        samples (Sequence[tuple[np.ndarray, ...]], optional): batches of the graph's inputs; with them, the linear
            layers and convolutions become INT8. Defaults to None.

    Returns:
        Exported: a report.
    """
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # All files are made and tried in here: a failure leaves those of an earlier export as they are.
        part = Path(folder, path.name)
        (_save_openvino if chosen.name == 'openvino' else _save_onnx)(traced, part, half, samples)
        found = differences(Runner(part)(*(each.numpy() for each in traced.inputs)), traced.expected)
        for made in sorted(Path(folder).iterdir()):  # .bin before .xml: one without the other is of no use
            made.replace(path.parent / made.name)
    return Exported(path, file_size(path), traced.norms, found)


def file_size(path: Path) -> int:
    """Bytes of an exported model on the disk; of OpenVINO's, with its weights."""
    files = [path, path.with_suffix('.bin')] if path.suffix == '.xml' else [path]
    return sum(file.stat().st_size for file in files)


def _save_onnx(traced: Traced, path: Path, half: bool, samples: Sequence | None) -> None:
    traced.program.model.metadata_props[KEY] = json.dumps(traced.meta)
    traced.program.save(path, external_data=False)
    if samples is not None:
        from .int8.onnx import quantize
        names = [each.name for each in traced.program.model.graph.inputs]
        quantize(path, path, (dict(zip(names, arrays, strict=True)) for arrays in samples))
    if half:
        import onnx
        model = onnx.load(path)
        store_as_half(model.graph)
        onnx.save(model, path)


def store_as_half(graph) -> None:
    """Stores the weights of an ONNX graph in float16, in place; a runtime makes them float32 again as it loads them.

    So it computes what it did before, with rounded weights: the pixels of boxes need more digits than float16 has.
    (onnxruntime's `convert_float_to_float16` also computes in float16.) Vectors and what float16 cannot hold stay.

    Args:
        graph (onnx.GraphProto): with its weights inside.
    """
    from onnx import TensorProto, helper, numpy_helper
    for tensor in graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        values = numpy_helper.to_array(tensor)
        if np.abs(values).max(initial=0.) > LARGEST_HALF:
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f'{name}_half'))
        graph.node.insert(0, helper.make_node('Cast', [tensor.name], [name], to=TensorProto.FLOAT))


def _save_openvino(traced: Traced, path: Path, half: bool, samples: Sequence | None) -> None:
    import openvino
    source = path.with_suffix('.onnx')
    traced.program.save(source, external_data=False)
    model = openvino.convert_model(source)
    source.unlink()
    if samples is not None:
        from .int8.openvino import quantize
        model = quantize(model, samples)
    model.set_rt_info(json.dumps(traced.meta), [KEY])
    openvino.save_model(model, path, compress_to_fp16=half)
