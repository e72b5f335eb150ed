"""What TensorRT documents about the files that it takes; TensorRT itself is not there."""
import pytest

for package in ('onnx', 'onnx_ir', 'onnxscript'):
    pytest.importorskip(package)

import onnx
import onnx_ir
from onnx import TensorProto, helper

from mmunorm.deploy.tensorrt_engine import check_limits
from mmunorm.errors import PreflightError


def graph(op, inputs, outputs, constants=(), dtype=TensorProto.FLOAT, **attributes):
    """One operator; `inputs` are shapes by name."""
    values = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()]
    node = helper.make_node(op, [*inputs, *[name for name, _ in constants]], outputs, name='it', **attributes)
    constants = [helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in constants]
    made = helper.make_graph([node], 'g', values, [helper.make_empty_tensor_value_info(name) for name in outputs],
                             constants)
    return onnx_ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(helper.make_model(made)))


@pytest.mark.parametrize('model, message', [
    (graph('TopK', dict(x=[1, 9000]), ['y', 'i'], [('k', 3841)]), 'at most 3840 .* has 3841.*rpn.nms_pre'),
    (graph('NonMaxSuppression', dict(boxes=[1, 6000, 4], scores=[1, 1, 6000]), ['y']), 'at most 5000 .* has 6000'),
    (graph('NonZero', dict(x=[3]), ['y']), 'no NonZero'),
    (graph('Relu', dict(x=[3]), ['y'], dtype=TensorProto.DOUBLE), 'no float64, which x'),
    (graph('Relu', dict(x=[3, 0]), ['y']), r'x of this model has no values: its shape is \[3, ?0\]'),
])
def test_what_is_refused(model, message):
    with pytest.raises(PreflightError, match=message):
        check_limits(model)


def test_what_is_taken():
    check_limits(graph('TopK', dict(x=[1, 9000]), ['y', 'i'], [('k', 3840)]))
