"""LiteRT files, `.tflite`, for phone CPUs and integer-only chips."""
from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, fx

from ...registry import MISSING
from ...utils import PreflightError
from ..comparison import mean_snr
from ..graph import Exportable, exporting
from ..int8.attention_ranges import fit_attention
from ..int8.ranges import CHOICES, Extremes, Ranges, Runs, fit_padding
from ..int8.tflite import changed, kind_of, read
from ..rewrite.norms import by_single_operators
from ..rewrite.operators import for_chips
from ..tasks import TASKS
from .base import EDGE_INSTALL, KEY, Batches, Format, Session, Variant, counted, listed, register_format, silent, stage

PRODUCTS = ('FULLY_CONNECTED', 'BATCH_MATMUL', 'CONV_2D')
COMPARED = 16  # maximum number of runs of each half that choose the ranges
CLEAR = 1.  # dB: a statistic that is so far behind on one half is not tried on the other


class LiteRtSession(Session):
    """Takes float32 images `(N, 3, H, W)` like every session, and converts them to the input type of the file."""

    def __init__(self, path: Path, threads: int | None = None):
        from ai_edge_litert.interpreter import Interpreter
        file = read(path)
        metas = [bytes(file.buffers[entry.buffer].data) for entry in file.metadata or () if entry.name == KEY.encode()]
        self.meta = json.loads(metas[0]) if metas else None
        with silent():
            interpreter = Interpreter(str(path), num_threads=threads)
            interpreter.allocate_tensors()
        self.parts = {name: interpreter.get_signature_runner(name) for name in interpreter.get_signature_list()}

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return TASKS[self.meta['task']].run(self.meta, self.call, *arrays)

    def input_of(self, part: str) -> tuple[str, dict]:
        """Name and details of a signature's input."""
        item, = self.parts[part].get_input_details().items()
        return item

    def call(self, part: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs of a signature by name, for any number of images or regions; all are float32."""
        (name, source), targets = self.input_of(part), self.parts[part].get_output_details()
        outs = {key: [np.zeros((0, *detail['shape'][1:]), np.float32)] for key, detail in targets.items()}
        number = source['shape'][0]
        for start in range(0, len(array), number):
            batch = array[start:start + number]
            out = self.parts[part](**{name: to_type(filled(batch, number), source)})
            for key, detail in targets.items():
                outs[key].append(from_type(out[key][:len(batch)], detail))
        return {key: np.concatenate(batches) for key, batches in outs.items()}


@register_format
class LiteRt(Format):
    name, suffixes, runtime, session = 'litert', ('.tflite', ), 'LiteRT', LiteRtSession
    packages, run_packages = ('litert_torch', 'ai_edge_litert'), ('ai_edge_litert', )
    int8_kinds, uncalibrated = ('dynamic', 'full', 'products'), ('dynamic', )
    int8_packages, takes_dynamic, tasks = ('ai_edge_quantizer', ), False, ('classifier', 'detector', 'tensors')
    install = "pip install '.[export]'" if 'mmpretrain' in MISSING else EDGE_INSTALL
    variants = {'litert': Variant(runtime), 'litert-dynamic': Variant(f'{runtime} INT8, dynamic range', 'dynamic'),
                'litert-products': Variant(f'{runtime} INT8, matmul-only', 'products'),
                'litert-full': Variant(f'{runtime} INT8, full-integer', 'full')}

    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Batches = ()) -> list[str]:
        with silent():
            write_float(converted(model, int8 == 'full'), path, model.meta)
        return quantize(path, 'half' if half else int8, samples, model.meta) if half or int8 else []

    def report(self, path: Path) -> list[str]:
        return [f'operators: {counted(operators_of(path))}']


def programs_of(model: Exportable, for_integers: bool) -> dict[str, tuple[fx.GraphModule, dict[str, Tensor]]]:
    """The signatures of a model as graphs, each with a sample of its inputs; `for_integers` with centered attention.

    Raises a PreflightError if torch cannot export it.
    """
    parts = TASKS[model.meta['task']].parts(by_single_operators(model.graph), model.inputs[0])
    with exporting():
        return {name: (for_chips(torch.export.export(part.eval(), (), sample, strict=False), for_integers), sample)
                for name, (part, sample) in parts.items()}


@lru_cache(maxsize=2)  # a benchmark writes several files of one model
def converted(model: Exportable, for_integers: bool) -> bytes:
    """The file of :func:`programs_of` in floating point. Raises a PreflightError if the converter does not take it."""
    import litert_torch
    converter = litert_torch
    for name, (program, sample) in programs_of(model, for_integers).items():
        converter = converter.signature(name, program, sample_kwargs=sample)
    with exporting():
        return converter.convert().model_content()  # its `export` ends the process if the disk is full


def write_float(content: bytes, path: Path, meta: dict) -> None:
    """Writes the result of :func:`converted` with metadata."""
    from ai_edge_litert import schema_py_generated as schema
    path.write_bytes(content)
    with changed(path) as file:
        for operator in (operator for graph in file.subgraphs for operator in graph.operators):
            # litert-torch samples at pixel centers, torch at cell `floor(i * old / new)`. They differ in an FPN with
            # odd sizes.
            if kind_of(file, operator) == 'RESIZE_NEAREST_NEIGHBOR':
                operator.builtinOptions.halfPixelCenters = False
        buffer, entry = schema.BufferT(), schema.MetadataT()
        buffer.data = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        entry.name, entry.buffer = KEY, len(file.buffers)
        file.buffers.append(buffer)
        file.metadata = [*(file.metadata or []), entry]


def quantize(path: Path, kind: str, samples: Batches, meta: dict) -> list[str]:
    """Rewrites a floating-point file with a kind of INT8, or 'half', by Google's AI Edge Quantizer.

    The statistic of `ranges.CHOICES` with the highest SNR is taken, where each half of the calibration batches
    `samples` is held out once; then the ranges are of all of them. Returns lines for the report. Raises a
    PreflightError if a full-integer file still has a floating-point tensor.
    """
    recipe = recipe_of(kind)
    if kind in ('half', *LiteRt.uncalibrated):
        with silent():
            write_quantized(path, recipe, None, path)
        return []
    stage(f'calibrating on {len(samples)} batches of images')
    with silent():
        data = calibration_data(path, samples, meta)
        extremes = Extremes(path, data)
    # Scale 1 and zero point -128: the integers are the image's bytes minus 128. Or the images are normalized ones.
    takes_pixels = meta.get('mean', ()) is not None

    def ranges(*arguments) -> Ranges:
        found = extremes.ranges(*arguments)
        for name, limits in found.items():
            # A layer that is 0 in all images: with its tiny scale the next layer's bias would overflow.
            limits['max'] = np.where(limits['max'] - limits['min'] < 1e-6, limits['min'] + 1, limits['max'])
            if takes_pixels and name.endswith('_images'):
                limits.update(min=np.zeros_like(limits['min']), max=np.full_like(limits['max'], 255))
        return found

    snr, choices = dict.fromkeys(CHOICES, 0.), list(CHOICES)
    with tempfile.TemporaryDirectory() as folder:
        candidate = Path(folder, 'm.tflite')
        for half in (0, 1):
            # A single image can change the SNR of 20 images by more than the statistics differ.
            held_out = {part: (runs[1 - half::2] or runs)[:COMPARED] for part, runs in data.items()}
            exact = outputs_of(path, held_out)
            for choice in choices:
                stage(f'quantizing, ranges: {choice}')
                with silent():
                    write_quantized(path, recipe, ranges(choice, half), candidate)
                    if kind == 'full' and (left := operators_of(candidate, in_float=True)):
                        raise PreflightError(f'these operators have no integer kernel: {listed(left)}.')
                    snr[choice] += mean_snr(outputs_of(candidate, held_out), exact)
            best = max(snr[choice] for choice in choices)
            choices = [choice for choice in choices if snr[choice] >= best - CLEAR]
            if len(choices) == 1:
                break
        stage(f'quantizing, ranges: {max(choices, key=snr.get)}')
        with silent():
            write_quantized(path, recipe, ranges(max(choices, key=snr.get)), candidate)
            lines = losses(path, candidate, data) if kind == 'full' else []
        path.write_bytes(candidate.read_bytes())
    return lines


def write_quantized(source: Path, recipe: list[dict], ranges: Ranges | None, path: Path) -> None:
    """Quantizes the floating-point file `source` with the calibrated ranges of its tensors, to `path`."""
    from ai_edge_quantizer import quantizer
    if ranges is not None:
        path.write_bytes(source.read_bytes())
        with changed(path) as file:
            for graph in file.subgraphs:
                fit_attention(file, graph, ranges)
                fit_padding(file, graph, ranges)
    quantizer.Quantizer(str(path), recipe).quantize(ranges).export_model(str(path), overwrite=True)


def losses(in_float: Path, quantized: Path, data: Runs) -> list[str]:
    """Which blocks of layers a full-integer file loses most in, on one input of its only signature, as a line.

    The quantizer's own comparison has the SNR of each tensor; a block's loss is from the end of the block before it.
    """
    from ai_edge_quantizer.model_validator import compare_model
    from ai_edge_quantizer.utils.validation_utils import ValidationErrorMetric
    (name, (first, *_)), *others = data.items()
    if others:
        return []
    compared = compare_model(in_float.read_bytes(), quantized.read_bytes(), {name: [first]},
                             [ValidationErrorMetric.SNR])
    graph, ratios = read(quantized).subgraphs[0], compared.get_all_tensor_results()
    noise = {}  # over signal, of the last tensor of each block
    for operator in graph.operators:
        tensor = graph.tensors[operator.outputs[0]].name.decode()
        if (block := block_of(tensor)) and tensor in ratios:
            noise[block] = 1 / max(ratios[tensor]['snr'], 1e-30)
    lost = {block: noise[block] - before for block, before in zip(noise, [0., *noise.values()], strict=False)}
    worst = [f'{block} (SNR after it {-10 * np.log10(noise[block]):.1f} dB)'
             for block in sorted(lost, key=lost.get, reverse=True)[:3]]
    return [f'loses most in {", ".join(worst)}'] if worst else []


def block_of(tensor: str) -> str:
    """The block of layers that computes a tensor, by the modules in its name, such as `Stage_1/Block_0`; '' if none."""
    modules = [module.rpartition('.')[2] for module in tensor.partition(';')[0].split('/')]
    blocks = [index for index, module in enumerate(modules) if re.search(r'(Block|Layer)_\w*\d$', module)]
    return '/'.join(module for module in modules[:blocks[-1] + 1] if re.search(r'_\d+$', module)) if blocks else ''


def outputs_of(path: Path, data: Runs) -> list[np.ndarray]:
    """The outputs of a file for some inputs of its signatures, one after another, as float32."""
    session = LiteRtSession(path)
    return [out for part, runs in data.items()
            for out in session.call(part, np.concatenate([array for run in runs for array in run.values()])).values()]


def calibration_data(path: Path, samples: Batches, meta: dict) -> Runs:
    """The inputs of each signature of a floating-point file for some images.

    Regions are the best ones of the first hundred batches, because they are large and held in memory.
    """
    session, data = LiteRtSession(path), {}

    def record(part: str, array: np.ndarray) -> None:
        name, detail = session.input_of(part)
        number = detail['shape'][0]
        data.setdefault(part, []).append({name: filled(array[:number], number)})

    task = TASKS[meta['task']]
    for index, arrays in enumerate(samples):
        if len(session.parts) > 1 and index < 100:
            task.run(meta, lambda part, array: record(part, array) or session.call(part, array), *arrays)
        else:
            record(*task.first(meta, *arrays))
    return data


def recipe_of(kind: str) -> list[dict]:
    """The quantizer's settings for a kind of file."""
    from ai_edge_quantizer import recipe
    from ai_edge_quantizer.recipe_manager import RecipeManager
    manager = RecipeManager()
    if kind == 'full':
        manager.load_quantization_recipe(recipe.static_wi8_ai8())
    elif kind == 'dynamic':
        manager.add_dynamic_config('.*', '*', 8)
        # Weights of zeros and ones; XNNPACK supports it only in float.
        manager.add_quantization_config('.*', 'DEPTHWISE_CONV_2D', algorithm_key='no_quantize')
    elif kind == 'half':
        manager.add_weight_only_config('.*', '*', 16, algorithm_key='float_casting')
    else:
        for operator in PRODUCTS:
            manager.add_static_config('.*', operator, 8, 8)
        manager.add_quantization_config('PerformerAttention', '*', algorithm_key='no_quantize')  # see onnx.IN_FLOAT
    return manager.get_quantization_recipe()


def filled(array: np.ndarray, number: int) -> np.ndarray:
    """An array padded with zeros to this size of the first dimension."""
    return np.concatenate([array, np.zeros((number - len(array), *array.shape[1:]), array.dtype)])


def to_type(array: np.ndarray, detail: dict) -> np.ndarray:
    """Quantizes an array to the type of a tensor of the file."""
    scale, zero = detail['quantization']
    if np.issubdtype(detail['dtype'], np.integer):
        bounds = np.iinfo(detail['dtype'])
        array = np.clip(np.round(array / scale) + zero, bounds.min, bounds.max)
    return array.astype(detail['dtype'])


def from_type(array: np.ndarray, detail: dict) -> np.ndarray:
    """Dequantizes a tensor of the file to float32."""
    scale, zero = detail['quantization']
    return (array.astype(np.float32) - zero) * np.float32(scale) if scale else array


def operators_of(path: Path, in_float: bool = False) -> Counter[str]:
    """The number of each operator in a file, with `in_float` only of those with a floating-point input or output."""
    from ai_edge_litert import schema_py_generated as schema
    model = read(path)
    floats = {getattr(schema.TensorType, name) for name in ('FLOAT16', 'FLOAT32', 'FLOAT64')}

    def counts(graph, operator) -> bool:
        return not in_float or any(index >= 0 and graph.tensors[index].type in floats
                                   for index in (*operator.inputs, *operator.outputs))

    return Counter(kind_of(model, operator) for graph in model.subgraphs for operator in graph.operators
                   if counts(graph, operator))
