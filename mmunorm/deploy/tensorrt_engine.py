"""An engine of TensorRT from an ONNX file.

Nobody has run :func:`build_engine`: it wants an NVIDIA GPU and TensorRT 10, and there was neither. What TensorRT
documents about the files that it takes is checked by :func:`check_limits`.
"""
from __future__ import annotations

from pathlib import Path

from ..errors import PreflightError

# From the documentation of ITopKLayer and of INMSLayer (boxes in a set).
MOST_OF_TOP_K, MOST_OF_NMS = 3840, 5000
# Operators that its ONNX parser lists as supported (docs/operators.md of onnx-tensorrt for TensorRT 8.5, where
# LayerNormalization and Gelu were still to come), as far as our graphs may have them.
OPERATORS = {
    'Add', 'And', 'AveragePool', 'BatchNormalization', 'Cast', 'Ceil', 'Clip', 'Concat', 'Constant', 'Conv',
    'ConvTranspose', 'Cos', 'CumSum', 'DequantizeLinear', 'Div', 'Equal', 'Erf', 'Exp', 'Expand', 'Flatten', 'Floor',
    'Gather', 'GatherElements', 'GatherND', 'Gelu', 'Gemm', 'GlobalAveragePool', 'Greater', 'GreaterOrEqual',
    'Identity', 'LayerNormalization', 'Less', 'LessOrEqual', 'Log', 'MatMul', 'Max', 'MaxPool', 'Min', 'Mod', 'Mul',
    'Neg', 'NonMaxSuppression', 'Not', 'Or', 'Pad', 'Pow', 'QuantizeLinear', 'Range', 'Reciprocal', 'ReduceMax',
    'ReduceMean', 'ReduceMin', 'ReduceSum', 'Relu', 'Reshape', 'Resize', 'RoiAlign', 'Round', 'ScatterND', 'Shape',
    'Sigmoid', 'Sin', 'Slice', 'Softmax', 'Split', 'Sqrt', 'Squeeze', 'Sub', 'Tanh', 'Tile', 'TopK', 'Transpose',
    'Trilu', 'Unsqueeze', 'Where',
}


def check_limits(model) -> None:
    """Checks what TensorRT documents about ONNX files.

    Args:
        model (onnx_ir.Model): with shapes.

    Raises:
        PreflightError: it has an operator that TensorRT lacks, numbers of 64 bits that are no integers, a tensor
            without values, or more candidates than TensorRT sorts; the message says what to lower.
    """
    for node in model.graph.all_nodes():
        if node.op_type not in OPERATORS:
            raise PreflightError(f'TensorRT has no {node.op_type}, which node {node.name} of this model is.')
        for value in [*node.inputs, *node.outputs]:
            if value is None or value.shape is None:
                continue
            if value.dtype is not None and value.dtype.name == 'DOUBLE':
                raise PreflightError(f'TensorRT has no float64, which {value.name} of this model is.')
            if any(side == 0 for side in value.shape if isinstance(side, int)) and value.name:
                raise PreflightError(f'{value.name} of this model has no values: its shape is {value.shape}.')
        if node.op_type == 'TopK':
            number = node.inputs[1].const_value
            if number is None:
                raise PreflightError(f'{node.name} sorts a number of candidates that is not fixed.')
            _check_number(int(number.numpy().item()), MOST_OF_TOP_K)
        if node.op_type == 'NonMaxSuppression':
            _check_number(node.inputs[0].shape[1], MOST_OF_NMS)


def _check_number(number: int, most: int) -> None:
    if number > most:
        raise PreflightError(
            f'TensorRT takes at most {most} candidates at once, and this model has {number}: lower it with '
            '--cfg-options, whichever it is of model.test_cfg.rpn.nms_pre, model.test_cfg.rpn.max_per_img and '
            'model.test_cfg.rcnn.max_per_img.')


def build_engine(path: Path, half: bool, int8: bool) -> bytes:
    """The engine of an ONNX file for the GPU of this machine.

    Args:
        path (Path): of the file.
        half (bool): compute in float16.
        int8 (bool): the file has quantizers.

    Raises:
        PreflightError: TensorRT does not take it; the message is TensorRT's own.
    """
    import tensorrt
    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    builder = tensorrt.Builder(logger)
    network = builder.create_network(0)
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise PreflightError(f'TensorRT cannot read {path}: {parser.get_error(0)}')
    config = builder.create_builder_config()
    if half:
        config.set_flag(tensorrt.BuilderFlag.FP16)
    if int8:
        config.set_flag(tensorrt.BuilderFlag.INT8)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise PreflightError(f'TensorRT cannot build an engine of {path}; what it logged above says why.')
    return bytes(engine)
