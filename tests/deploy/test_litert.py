"""LiteRT's files: integers only, what they leave out, and how near they are to torch."""
import subprocess
import sys

import numpy as np
import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.deploy import FORMATS, Runner, export_file, prepare_export
from mmunorm.deploy.edge import fold_pixels
from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.pictures import Samples
from mmunorm.utils import PreflightError

from ..fusion import models
from .conftest import blurred, meta_of, normalizing
from .test_int8 import signal_to_noise


@pytest.mark.parametrize('make, size, is_folded', [
    (models.swin_classifier, (36, 44), True), (models.deit_classifier, (32, 32), True),
    (models.t2t_classifier, (32, 32), False)])
@pytest.mark.parametrize('flips', [False, True])
def test_pixels_are_normalized_by_the_first_layer(make, size, is_folded, flips):
    model = normalizing(make())
    model.data_preprocessor.to_rgb = flips
    model.data_preprocessor.mean[:, 0, 0] = torch.tensor([100., 120, 140])
    graph, images = graph_of(model), torch.rand(2, 3, *size) * 255
    folded = fold_pixels(graph, images)
    assert isinstance(folded.pixels.normalization, torch.nn.Identity) == is_folded
    with torch.no_grad():
        torch.testing.assert_close(folded(images), graph(images), rtol=0, atol=1e-6)


for package in ('litert_torch', 'ai_edge_quantizer', 'ai_edge_litert'):
    pytest.importorskip(package)

from ai_edge_litert.interpreter import Interpreter, OpResolverType

from mmunorm.deploy.edge import with_edge_layers
from mmunorm.deploy.formats.litert import operators_of

LITERT = FORMATS['litert']


@pytest.mark.parametrize('make, size, number', [
    (models.swin_classifier, (37, 45), 2), (models.swin_classifier, (32, 32), 1), (models.vit_classifier, (32, 32), 2),
    (models.t2t_classifier, (32, 32), 2)])
def test_layers_for_chips_compute_what_the_stock_ones_do(make, size, number):
    model = normalizing(make())
    fuse_norms(model)
    graph, images = graph_of(model), torch.rand(number, 3, *size) * 255
    with torch.no_grad():
        edge = with_edge_layers(graph, (images, ))
        program = torch.export.export(edge, (images, ), strict=False)  # has the masks of cut windows already
        torch.testing.assert_close(program.module()(images), graph(images), rtol=0, atol=1e-6)
        torch.testing.assert_close(edge(images), graph(images), rtol=0, atol=1e-6)
        values = [node.meta.get('val') for node in program.graph.nodes]
    assert max(value.dim() for value in values if isinstance(value, torch.Tensor)) == 4


def export(exportable, path, int8=None, **how):
    samples = Samples(list(blurred()), exportable.meta, 2) if int8 not in (None, 'dynamic') else ()
    return export_file(exportable, LITERT, path, int8=int8, samples=samples, **how)


@pytest.fixture(scope='module')
def full(exportable, tmp_path_factory):
    return export(exportable, tmp_path_factory.mktemp('full') / 'm.tflite', 'full')


def test_integers_only(swin, full):
    assert signal_to_noise(swin, full.path) > 18 and not operators_of(full.path, in_float=True)
    _, detail = Runner(full.path)._session.input_of('classify')
    assert detail['quantization'] == (1.0, -128)
    assert [line.split(':')[0] for line in full.lines] == ['operators', "XNNPACK's parts on this CPU"]
    assert 'BATCH_MATMUL' not in full.lines[1]  # XNNPACK takes those whose second factor is symmetric
    # -100 between windows would leave the scores a step of 0.4.
    interpreter = Interpreter(
        str(full.path), experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    interpreter.allocate_tensors()
    steps = [interpreter._get_tensor_details(operator['inputs'][0], 0)['quantization'][0]
             for operator in interpreter._get_ops_details() if operator['op_name'] == 'SOFTMAX']
    assert len(steps) == 3 and max(steps) < 0.1


@pytest.mark.parametrize('kind, least', [('dynamic', 25), ('products', 20), ('full16', 18)])
def test_int8(swin, exportable, tmp_path, kind, least):
    made = export(exportable, tmp_path / 'm.tflite', kind)
    assert signal_to_noise(swin, made.path) > least
    assert bool(operators_of(made.path, in_float=True)) == (kind != 'full16')


def test_layer_norm_has_no_kernel_in_16_bits(tmp_path):
    exportable = prepare_export(model := normalizing(models.swin_classifier(dict(type='LN'))), meta_of(model), 2)
    with pytest.raises(PreflightError, match='no kernel in integers: .*SQUARED_DIFFERENCE'):
        export(exportable, tmp_path / 'm.tflite', 'full16')
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize('make', [models.t2t_classifier, models.deit_classifier])
def test_other_classifiers(tmp_path, make):
    model = normalizing(make())
    fuse_norms(model, strict=True)
    made = export(prepare_export(model, meta_of(model, (32, 32))), tmp_path / 'm.tflite')
    assert made.norms == 0 and made.difference.largest['scores'] < 2e-6


def test_heads_are_those_of_a_detector(exportable, tmp_path):
    with pytest.raises(PreflightError, match='--heads goes with --int8 and a detector'):
        export(exportable, tmp_path / 'm.tflite', 'full', heads='float')


def test_a_size_that_is_open_is_refused(tmp_path):
    model = normalizing(models.deit_classifier())
    with pytest.raises(PreflightError, match='--dynamic does not go with --format litert'):
        export(prepare_export(model, meta_of(model, (32, 32)), dynamic=True), tmp_path / 'm.tflite')


def test_a_file_runs_without_torch(full, tmp_path):
    """docs/deployment.md shows these lines."""
    pictures = blurred(2).permute(0, 2, 3, 1).numpy()
    np.save(tmp_path / 'pictures.npy', pictures)
    code = f"""
import sys
import numpy as np
from ai_edge_litert.interpreter import Interpreter
pictures = np.load({str(tmp_path / 'pictures.npy')!r})
classify = Interpreter({str(full.path)!r}).get_signature_runner('classify')
logits = classify(images=(pictures.astype(np.int16) - 128).astype(np.int8))['logits']
assert 'torch' not in sys.modules and logits.dtype == np.int8
print(*logits.argmax(1))
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    scores = Runner(full.path)(pictures.transpose(0, 3, 1, 2))['scores']
    assert [int(each) for each in done.stdout.split()] == list(scores.argmax(1))
