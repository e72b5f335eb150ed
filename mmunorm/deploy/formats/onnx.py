"""ONNX files, for ONNX Runtime."""
from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from ..graph import Exportable, exporting
from ..rewrite.operators import LOWEST
from ..vendors.graph import for_compiler, images_for, outputs_of
from .base import KEY, Batches, Format, Session, Variant, register_format, silent, stage

LARGEST_HALF = 65504.
# Attributes that opset 17 lacks, and onnx's converter keeps.
OPSET_18 = ('noop_with_empty_axes', 'keep_aspect_ratio_policy', 'antialias')
IR_VERSION = 8  # that of opset 18; compilers of chips have an older onnx than torch
# The quantized operators. Without Add and Mul, which would quantize the residual stream to 8 bits.
INT8_OPERATORS = ['Conv', 'Gemm', 'MatMul']
# Prefixes of the names of a Performer's nodes. Its exponentials amplify errors.
IN_FLOAT = 'performer'
# Convolutions over fewer channels stay in float: those of pixels, and depthwise ones. They cost little time.
LEAST_CHANNELS = 32


class OnnxSession(Session):

    def __init__(self, path: Path, threads: int | None):
        import onnxruntime
        options = onnxruntime.SessionOptions()
        if threads:
            options.intra_op_num_threads = threads
        # Spinning threads would slow down other processes.
        options.add_session_config_entry('session.intra_op.allow_spinning', '0')
        # Only the CPU: TensorRT would build an engine for minutes.
        self.session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
        self.meta = _meta_in(self.session.get_modelmeta().description)
        self.names = [value.name for value in self.session.get_inputs()]

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        if 'host' not in self.meta:
            return self.session.run(None, dict(zip(self.names, arrays, strict=True)))
        return outputs_of(self.session.run(None, {self.names[0]: images_for(arrays, self.meta)}), self.meta)


@register_format
class Onnx(Format):
    name, suffixes, runtime, session = 'onnx', ('.onnx', ), 'ONNX Runtime', OnnxSession
    packages, run_packages = ('onnx', 'onnxscript', 'onnxruntime'), ('onnxruntime', )
    int8_kinds, uncalibrated, float_kinds = ('static', 'external'), ('external', ), ('external', )
    variants = {'onnx': Variant(runtime), 'onnx-int8': Variant(f'{runtime} INT8', 'static')}

    def export(self, model: Exportable, path: Path, half: bool = False, int8: str | None = None,
               samples: Batches = ()) -> None:
        write_onnx(for_compiler(model) if int8 == 'external' else model, path)
        if int8 == 'static':
            stage(f'calibrating on {len(samples)} batches, quantizing')
            quantize_file(path, (dict(zip(model.graph.inputs, arrays, strict=True)) for arrays in samples))
        if half:
            store_as_half(path)


def write_onnx(model: Exportable, path: Path) -> None:
    """Writes a model as an ONNX file in floating point. Raises a PreflightError if torch cannot export it."""
    program = _onnx_program(model)
    # In the description, because ONNX Runtime's `qnn_preprocess_model` fails at metadata_props.
    program.model.doc_string = json.dumps({KEY: model.meta})
    program.model.ir_version = IR_VERSION
    program.save(path, external_data=False)


def read_meta(path: Path) -> dict | None:
    """The metadata of a file; None if it has none."""
    import onnx
    return _meta_in(onnx.load(path, load_external_data=False).doc_string)


def lower_opset(path: Path) -> None:
    """Writes a file of :func:`write_onnx` in opset 17, for compilers that know no newer one, in place."""
    import onnx.version_converter
    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in [attribute for attribute in node.attribute if attribute.name in OPSET_18]:
            node.attribute.remove(attribute)
    onnx.save(onnx.version_converter.convert_version(model, 17), path)


def _meta_in(text: str) -> dict | None:
    try:
        found = json.loads(text)
    except ValueError:  # another exporter's
        return None
    return found.get(KEY) if isinstance(found, dict) else None


@lru_cache(maxsize=1)  # a benchmark writes several files of one model
def _onnx_program(model: Exportable) -> torch.onnx.ONNXProgram:
    program = model.program
    # An input and an output of one name would be one value.
    outputs = [f'output_{name}' if name in model.graph.inputs else name for name in model.graph.outputs]
    with exporting():
        exported = torch.onnx.export(program, model.inputs, dynamo=True, verbose=False, opset_version=18,
                                     input_names=list(model.graph.inputs), output_names=outputs,
                                     custom_translation_table=_translations(program))
    for node in exported.model.graph.all_nodes():
        if 'PerformerAttention' in node.metadata_props.get('pkg.torch.onnx.class_hierarchy', ''):
            node.name = f'{IN_FLOAT}_{node.name}'
        node.metadata_props.clear()  # lines of code and paths of this machine
        if node.op_type == 'LayerNormalization':
            _own_weights(node)
    return exported


def _own_weights(node) -> None:
    """Copies the weights that a norm shares: a quantizer gives equal scales and biases one type, and QNN fails."""
    from onnxscript import ir
    for index, value in enumerate(node.inputs):
        if value is not None and value.is_initializer() and len(value.uses()) > 1:
            name = f'{node.name}.{("weight", "bias")[index - 1]}'
            copy = ir.val(name, const_value=ir.tensor(value.const_value.numpy()))
            node.graph.register_initializer(copy)
            node.replace_input_with(index, copy)


def _translations(program: torch.export.ExportedProgram) -> dict:
    """Functions that write operators of torch in ONNX, by operator."""
    from onnxscript import ir
    from onnxscript import opset18 as op

    def gelu(x, approximate: str = 'none'):
        """In the order of operators that compilers of chips replace by one; opset 20's `Gelu` they do not know."""
        half, one, root, cubic = (op.Constant(value_float=value) for value in (0.5, 1., 2**0.5, 0.044715))
        if approximate == 'tanh':
            slope = op.Constant(value_float=(2 / math.pi)**0.5)
            inner = op.Tanh(op.Mul(slope, op.Add(x, op.Mul(cubic, op.Mul(x, op.Mul(x, x))))))
        else:
            inner = op.Erf(op.Div(x, root))
        return op.Mul(op.Mul(x, op.Add(inner, one)), half)

    def attention(query, key, value, attn_mask=None, dropout_p: float = 0., is_causal: bool = False,
                  scale: float | None = None, enable_gqa: bool = False):
        """torch's own translation scales twice, transposes in 3 dimensions, and takes no masks there."""
        if scale != 1:
            query = op.Mul(query, op.Constant(value_float=query.shape[-1]**-0.5 if scale is None else scale))
        *outer, tokens, width = range(len(key.shape))
        scores = op.MatMul(query, op.Transpose(key, perm=[*outer, width, tokens]))
        is_allowed = None
        if attn_mask is not None and attn_mask.dtype == ir.DataType.BOOL:
            # Rows that allow nothing are 0 in torch. Runtimes compute this once if the mask is constant.
            is_allowed = op.ReduceMax(op.Cast(attn_mask, to=ir.DataType.FLOAT), op.Constant(value_ints=[-1]))
            attn_mask = op.Where(attn_mask, op.Constant(value_float=0.), op.Constant(value_float=LOWEST))
        if attn_mask is not None:
            scores = op.Add(scores, attn_mask)
        out = op.MatMul(op.Softmax(scores, axis=-1), value)
        return out if is_allowed is None else op.Mul(out, is_allowed)

    def nms_mask(boxes, scores, iou_threshold: float):
        """See :func:`mmunorm.deploy.tasks.detector.postprocess.nms_mask`."""
        size = op.Shape(scores)
        most = op.Slice(size, op.Constant(value_ints=[1]), op.Constant(value_ints=[2]))
        selected = op.NonMaxSuppression(
            boxes, op.Unsqueeze(scores, op.Constant(value_ints=[1])), most,
            op.Constant(value_float=iou_threshold), op.Constant(value_float=0.))
        # Rows of (set, class, box). Their number depends on the data, so they are converted to a mask.
        indices = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)
        number = op.Slice(op.Shape(selected), op.Constant(value_ints=[0]), op.Constant(value_ints=[1]))
        zeros = op.Expand(op.Constant(value_float=0.), size)
        return op.ScatterND(zeros, indices, op.Expand(op.Constant(value_float=1.), number))

    aten = torch.ops.aten
    table = {aten.gelu.default: gelu, torch.ops.mmunorm.nms_mask.default: nms_mask}
    if not any(node.args[5:6] == (True, ) or node.kwargs.get('enable_gqa') for node in program.graph.nodes
               if node.target is aten.scaled_dot_product_attention.default):
        table[aten.scaled_dot_product_attention.default] = attention
    return table


def store_as_half(path: Path) -> None:
    """Stores the weights of a file in float16; runtimes cast them to float32 on loading.

    Only the weights are rounded, because box coordinates need a higher precision than float16. (onnxruntime's
    `convert_float_to_float16` also computes in float16.) Vectors and values beyond the range of float16 are unchanged.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        values, name = numpy_helper.to_array(tensor), tensor.name
        if values.dtype == np.float32 and values.ndim > 1 and np.abs(values).max(initial=0.) <= LARGEST_HALF:
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f'{name}_half'))
            model.graph.node.insert(0, helper.make_node('Cast', [tensor.name], [name], to=TensorProto.FLOAT))
    onnx.save(model, path)


def quantize_file(path: str | Path, inputs: Iterable[dict[str, np.ndarray]]) -> None:
    """Quantizes a file to INT8; `inputs` are calibration batches by input name.

    ONNX Runtime uses its integer kernels. Linear layers output floating point; convolutions output 8 bits, because
    their kernel supports nothing else. Weights use 7 bits, for CPUs without VNNI. Products of two activations stay in
    floating point.
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    model = onnx.load(path)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    in_float = {node.name for node in model.graph.node
                if node.name.startswith(IN_FLOAT)
                or node.op_type == 'MatMul' and node.input[1] not in weights
                or node.op_type == 'Conv' and (  # timm's StdConv2d computes its weights
                    node.input[1] not in weights or weights[node.input[1]].dims[1] < LEAST_CHANNELS)}
    separate_inputs(model.graph, in_float)
    keep_matmuls(model.graph)
    with silent():  # it recommends a step that the exporter already did
        quantize_static(
            model, path, reader_of(inputs), quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, op_types_to_quantize=INT8_OPERATORS,
            nodes_to_exclude=sorted(in_float),
            extra_options=dict(OpTypesToExcludeOutputQuantization=['Gemm', 'MatMul']))


def reader_of(inputs: Iterable[dict[str, np.ndarray]]):
    """Calibration batches as ONNX Runtime reads them."""
    return SimpleNamespace(get_next=partial(next, iter(inputs), None))


def separate_inputs(graph, in_float: Iterable[str] = ()) -> None:
    """Inserts an Identity before each layer in INT8 whose input has other consumers, in place.

    The quantizer replaces a tensor for all of its consumers. Without this, a layer that consumes the residual stream,
    such as one after a folded norm, would quantize the stream to 8 bits. The runtime removes the Identity.
    """
    from onnx import helper
    readers = Counter(name for node in graph.node for name in node.input)
    nodes = []
    for node in graph.node:
        name = node.input[0] if node.op_type in INT8_OPERATORS and node.name not in in_float else ''
        if name and readers[name] > 1:
            node.input[0] = f'{name}_of_{node.name}'
            nodes.append(helper.make_node('Identity', [name], [node.input[0]], name=f'{node.name}_input'))
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def keep_matmuls(graph) -> None:
    """Reshapes the bias of a matrix product with three or more dimensions to `(1, 1, C)`, in place.

    ONNX Runtime fuses a MatMul and an Add with a bias `(C, )` to a Gemm, for which it has no integer kernel: it would
    dequantize the weights in every run. A separate MatMul becomes a MatMulIntegerToFloat. The `graph` must have
    inferred shapes.
    """
    from onnx import numpy_helper
    products = {name for node in graph.node if node.op_type == 'MatMul' for name in node.output} & {
        value.name for value in graph.value_info if len(value.type.tensor_type.shape.dim) > 2}
    biases = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if len(tensor.dims) == 1}
    for node in graph.node:
        for index, (bias, product) in enumerate((node.input, node.input[::-1]) if node.op_type == 'Add' else ()):
            if bias in biases and product in products:
                node.input[index] = f'{node.output[0]}_bias'
                graph.initializer.append(numpy_helper.from_array(biases[bias][None, None], node.input[index]))
                break
