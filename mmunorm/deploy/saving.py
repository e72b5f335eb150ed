"""Writes a traced model as a file for a runtime, and runs that file once."""
from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files import whole_file
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
        difference: the largest absolute difference to torch by kind of output, for pictures of noise; empty if
            torch finds no object in them.
    """
    path: Path
    size: int
    norms: int
    difference: dict[str, float]


def save(traced: Traced, chosen: Format, path: str | Path, half: bool = False,
         samples: Sequence[tuple[np.ndarray, ...]] | None = None) -> Exported:
    """Writes a graph as a file for a runtime, runs it there and compares it with torch.

    An engine of TensorRT cannot be run here; the ONNX file that it is made of stays beside it, and is compared.

    Args:
        traced (Traced): what :func:`trace` gives.
        chosen (Format): what :func:`find_format` gives.
        path: of the file, with the suffix of the format.
        half (bool): weights in float16; TensorRT also computes in it. Defaults to False.
        samples (Sequence[tuple[np.ndarray, ...]], optional): batches of the graph's inputs; with them, the linear
            layers and convolutions become INT8. Defaults to None.

    Returns:
        Exported: a report.

    Raises:
        PreflightError: TensorRT cannot take the model.
    """
    path = Path(path)
    if chosen.name == 'openvino':
        _save_openvino(traced, path, half, samples)
        runnable = path
    else:
        runnable = path.with_suffix('.onnx')
        if chosen.name == 'tensorrt':
            from .tensorrt_engine import build_engine, check_limits
            check_limits(traced.program.model)
        is_engine = chosen.name == 'tensorrt'
        _save_onnx(traced, runnable, half and not is_engine, samples, symmetric=is_engine)
        if chosen.name == 'tensorrt':
            with whole_file(path) as part:
                part.write_bytes(build_engine(runnable, half))
    got = Runner(runnable)(*(each.numpy() for each in traced.inputs))
    return Exported(path, file_size(path), traced.norms, differences(got, traced.expected))


def file_size(path: Path) -> int:
    """Bytes of an exported model on the disk; of OpenVINO's, with its weights."""
    return sum(file.stat().st_size for file in {path, path.with_suffix('.bin')} if file.exists())


def _save_onnx(traced: Traced, path: Path, half: bool, samples: Sequence | None, symmetric: bool) -> None:
    traced.program.model.metadata_props[KEY] = json.dumps(traced.meta)
    with whole_file(path) as part:
        traced.program.save(part, external_data=False)
        if samples is not None:
            from .int8.onnx import quantize
            names = [each.name for each in traced.program.model.graph.inputs]
            quantize(part, part, (dict(zip(names, arrays, strict=True)) for arrays in samples), symmetric)
        if half:
            import onnx
            model = onnx.load(part)
            store_as_half(model.graph)
            onnx.save(model, part)


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
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source = Path(folder, 'model.onnx')
        traced.program.save(source, external_data=False)
        model = openvino.convert_model(source)
        if samples is not None:
            from .int8.openvino import quantize
            model = quantize(model, samples)
        model.set_rt_info(json.dumps(traced.meta), [KEY])
        openvino.save_model(model, Path(folder, path.name), compress_to_fp16=half)
        # First the weights: without them, the other file is of no use.
        for suffix in ('.bin', '.xml'):
            Path(folder, path.name).with_suffix(suffix).replace(path.with_suffix(suffix))


def differences(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest absolute difference by kind of output: `scores`; of a detector also `boxes` and `masks`.

    A detection is compared with the nearest one of its class, because those of equal score have no order. Where
    there is none, the difference is infinite. Without any detection on both sides, there is nothing to compare, and
    the dict is empty.
    """
    if 'dets' not in expected:
        return dict(scores=float(np.abs(got['scores'] - expected['scores']).max()))
    found, wanted = ((each['dets'][..., 4] > 0).sum(1) for each in (got, expected))
    if not (found.any() or wanted.any()):
        return {}
    largest = dict.fromkeys(('scores', 'boxes', *(['masks'] if 'masks' in expected else [])), 0.)

    def note(kind, value):
        largest[kind] = max(largest[kind], float(value))

    for image, dets in enumerate(expected['dets']):
        for index in np.flatnonzero(dets[:, 4] > 0):
            same = (got['labels'][image] == expected['labels'][image, index]) & (got['dets'][image, :, 4] > 0)
            if not same.any():
                return dict.fromkeys(largest, float('inf'))
            distance = np.abs(got['dets'][image] - dets[index])
            nearest = np.where(same, distance.max(1), np.inf).argmin()
            note('boxes', distance[nearest, :4].max())
            note('scores', distance[nearest, 4])
            if 'masks' in largest:
                note('masks', np.abs(got['masks'][image, nearest] - expected['masks'][image, index]).max())
    return largest
