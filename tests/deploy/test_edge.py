"""LiteRT's, ExecuTorch's and the Ethos-U's files: what they leave out, and how near they are to torch."""
import re
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from torch import nn

import mmunorm
from mmunorm.deploy import FORMATS, ExportedModel, export_file, prepare_export
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats.executorch import quantize_graph
from mmunorm.deploy.preprocessing import Samples
from mmunorm.deploy.rewrite.operators import for_chips
from mmunorm.deploy.rewrite.pixels import fold_pixels
from mmunorm.deploy.tasks import graph_of
from mmunorm.fusion import FoldedLayerNorm, FoldedRMSNorm
from mmunorm.utils import PreflightError

from ..fusion import models
from .conftest import blurred, fitted, folded, long_queries, meta_of, needs, normalizing, one_stage, signal_to_noise

LITERT, EXECUTORCH, ETHOS_U = (FORMATS[name] for name in ('litert', 'executorch', 'ethos-u'))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return x + self.layer(x)


def with_pixels(make, images, flips=False, divisor=1):
    """A model's graph that takes values from 0 to 255; that of a classifier may pad them with 3."""
    model = make()
    if not hasattr(model, 'data_preprocessor'):
        return as_exportable(model, images / 255, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3)).graph
    preprocessor = normalizing(model).data_preprocessor
    preprocessor.to_rgb, preprocessor.pad_size_divisor, preprocessor.pad_value = flips, divisor, 3
    preprocessor.mean[:, 0, 0] = torch.tensor([100., 120, 140])
    return graph_of(model)


@pytest.mark.parametrize('make, how, is_folded', [
    (models.swin_classifier, {}, True), (models.swin_classifier, dict(flips=True), True),
    (models.swin_classifier, dict(divisor=24), False), (models.deit_classifier, dict(flips=True), True),
    (models.t2t_classifier, {}, False), (models.t2t_classifier, dict(flips=True), False), (Residual, {}, False),
    (lambda: timm.layers.Conv2dSame(3, 4, 3, stride=2), {}, False),
    (lambda: timm.layers.StdConv2d(3, 4, 4, stride=4), {}, False)])
def test_pixels_are_normalized_by_the_first_layer_where_it_can(make, how, is_folded):
    torch.manual_seed(0)
    images = torch.rand(2, 3, 32, 32) * 255
    graph = with_pixels(make, images, **how)
    raw = fold_pixels(graph, images)
    assert isinstance(raw.pixels.normalization, nn.Identity) == is_folded
    with torch.no_grad():
        torch.testing.assert_close(raw(images), graph(images), rtol=0, atol=1e-5)


needs('litert', 'ethos-u', 'executorch', 'onnx')  # which the newer torch alone has

from ai_edge_litert.interpreter import Interpreter, OpResolverType

from mmunorm.deploy.formats.ethos_u import compile_file
from mmunorm.deploy.formats.litert import operators_of


@pytest.mark.parametrize('make, size, number, is_folded', [
    (models.swin_classifier, (37, 45), 2, True), (models.swin_classifier, (32, 32), 1, False),
    (models.vit_classifier, (32, 32), 2, True), (models.t2t_classifier, (32, 32), 2, True),
    (models.t2t_classifier, (32, 32), 2, False)])
def test_graphs_for_chips_compute_what_the_stock_ones_do(make, size, number, is_folded):
    model = folded(make)[0] if is_folded else normalizing(make())
    graph, images = graph_of(model.eval()), torch.rand(number, 3, *size) * 255
    with torch.no_grad():
        program = for_chips(torch.export.export(graph, (images, ), strict=False))
        torch.testing.assert_close(program(images), graph(images), rtol=0, atol=1e-6)
    nodes = [node for node in program.graph.nodes if isinstance(node.meta.get('val'), torch.Tensor)]
    assert max(node.meta['val'].dim() for node in nodes) == 4
    kinds, aten = {node.target for node in nodes if node.op == 'call_function'}, torch.ops.aten
    assert not {aten.arange.default, aten.roll.default, aten.scaled_dot_product_attention.default,
                aten.im2col.default} & kinds


def export(exportable, path, int8=None, **how):
    height, width = exportable.meta['shape'][2:]
    images = list(blurred(16)[..., :height, :width])
    samples = Samples(images, exportable.meta, 2) if int8 not in (None, 'dynamic') else ()
    return export_file(exportable, LITERT, path, int8=int8, samples=samples, **how)


@pytest.fixture(scope='module')
def full(exportable, tmp_path_factory):
    return export(exportable, tmp_path_factory.mktemp('full') / 'm.tflite', 'full')


def steps_of_scores(path):
    """How far apart the values are that each softmax reads."""
    interpreter = Interpreter(
        str(path), experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    interpreter.allocate_tensors()
    return [interpreter._get_tensor_details(operator['inputs'][0], 0)['quantization'][0]
            for operator in interpreter._get_ops_details() if operator['op_name'] == 'SOFTMAX']


def test_integers_only(swin, full):
    assert signal_to_noise(swin, full.path) > 18 and not operators_of(full.path, in_float=True)
    _, detail = ExportedModel(full.path)._session.input_of('classify')
    assert detail['quantization'] == (1.0, -128)
    assert full.lines[0].startswith('usual in INT8: 20 to 40 dB')
    block = r'SwinBlockSequence_\d/SwinBlock_\d \(SNR after it \d+\.\d dB\)'
    assert re.match(f'loses most in {block}, {block}, {block}$', full.lines[1])
    lines = dict(line.split(':', 1) for line in full.lines[2:])
    assert list(lines) == ['operators', 'XNNPACK partitions on this CPU']
    # It takes those whose second factor is symmetric.
    assert 'BATCH_MATMUL' not in lines['XNNPACK partitions on this CPU']
    # -1000 between windows would leave the scores a step of 4.
    assert len(steps_of_scores(full.path)) == 3 and max(steps_of_scores(full.path)) < 0.1


@pytest.mark.parametrize('kind, least', [('dynamic', 25), ('products', 20)])  # one conversion
def test_int8(swin, exportable, tmp_path, kind, least):
    report = export(exportable, tmp_path / 'm.tflite', kind)
    assert signal_to_noise(swin, report.path) > least
    assert operators_of(report.path, in_float=True)


class Masked(nn.Module):
    """Two attentions with one mask, as of shifted windows without position biases."""

    def __init__(self):
        super().__init__()
        self.patches, group = nn.Conv2d(3, 8, 8, 8), torch.arange(16) < 8
        self.register_buffer('cut', torch.where(group == group[:, None], 0., -1000.))

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        for _ in range(2):
            x = x + (x @ x.mT / 8**0.5 + self.cut).softmax(-1) @ x
        return x.flatten(1)


def test_attentions_that_share_what_is_added_to_their_scores(tmp_path):
    torch.manual_seed(0)
    images = torch.randn(8, 3, 32, 32)
    mmunorm.export(Masked(), images[:1], tmp_path / 'm.tflite', 'full', images)
    steps = steps_of_scores(tmp_path / 'm.tflite')
    assert len(steps) == 2 and max(steps) < 0.1


@pytest.mark.parametrize('norm', [FoldedLayerNorm(32, 1e-5, is_padded=True), FoldedRMSNorm(32, None),
                                  FoldedLayerNorm(32, 1e-5, is_centered=True, linear=True)])
def test_norms_without_weights_in_8_bits(norm, tmp_path):
    torch.manual_seed(0)
    last = nn.Linear(32, 8)
    first = nn.Conv2d(3, 32, 4)
    if isinstance(norm, FoldedLayerNorm) and norm.is_centered:
        first.weight.data -= first.weight.data.mean(0)
        first.bias.data -= first.bias.data.mean()
    model = nn.Sequential(first, nn.Flatten(1), nn.Unflatten(1, (1, 32)), norm, last)  # one token
    images = torch.randn(8, 3, 4, 4)
    assert mmunorm.export(model, images[:1], tmp_path / 'f.tflite').difference.snr['output'] > 100
    report = mmunorm.export(model, images[:1], tmp_path / 'm.tflite', 'full', images)
    assert not operators_of(tmp_path / 'm.tflite', in_float=True) and report.difference.snr['output'] > 25
    assert 'norms left: 1, 1 of them without weights' in str(report)
    assert 'norms without weights: single operators in 8 bits' in report.lines


@pytest.fixture(scope='module')
def performers():
    torch.manual_seed(0)
    return long_queries()


@pytest.mark.slow
@pytest.mark.parametrize('kind, least', [('dynamic', 15), ('products', 15), (None, 90)])
def test_performer(performers, tmp_path, kind, least):
    """Some of its sums are 0; in integers, its exponentials have no kernel."""
    model, exportable = performers
    report = export(exportable, tmp_path / 'm.tflite', kind)
    assert operators_of(report.path)['EXP'] == 4 and report.norms == 0
    assert signal_to_noise(model, report.path, (32, 32)) > least


def test_operators_without_an_integer_kernel_are_named_before_files_are_compared(performers, tmp_path, monkeypatch):
    monkeypatch.setattr('mmunorm.deploy.formats.litert.mean_snr', None)
    with pytest.raises(PreflightError, match='these operators have no integer kernel: .*EXP 4'):
        export(performers[1], tmp_path / 'm.tflite', 'full')


def test_what_is_refused(exportable, tmp_path):
    _, dynamic = folded(models.deit_classifier, dynamic=True)
    for model, chosen, how, message in (
            (dynamic, LITERT, {}, '--dynamic is not supported by --format litert'),
            (exportable, EXECUTORCH, dict(half=True), '--half is not supported by --format executorch'),
            (dynamic, EXECUTORCH, {}, '--dynamic is not supported by --format executorch'),
            (exportable, ETHOS_U, dict(half=True, int8='full'), '--half is not supported by --format ethos-u')):
        with pytest.raises(PreflightError, match=message):
            export_file(model, chosen, tmp_path / f'm{chosen.suffixes[0]}', **how)


def test_a_file_runs_without_torch(full, tmp_path):
    """docs/how_to/deployment.md shows these lines."""
    images = blurred(2).permute(0, 2, 3, 1).numpy()
    np.save(tmp_path / 'images.npy', images)
    code = f"""
import sys
import numpy as np
from ai_edge_litert.interpreter import Interpreter
images = np.load({str(tmp_path / 'images.npy')!r})
classify = Interpreter({str(full.path)!r}).get_signature_runner('classify')
logits = classify(images=(images.astype(np.int16) - 128).astype(np.int8))['logits']
assert 'torch' not in sys.modules and logits.dtype == np.int8
print(*logits.argmax(1))
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    scores = ExportedModel(full.path)(images.transpose(0, 3, 1, 2))['scores']
    assert list(map(int, done.stdout.split())) == list(scores.argmax(1))


def test_a_swin_in_executorch(tmp_path):
    """Its padding tokens follow a reshape, which XNNPACK loads in INT8 only if the range stays the same."""
    torch.manual_seed(0)
    model = fitted(one_stage(1))
    exportable = prepare_export(model, meta_of(model), 2)
    report = export_file(exportable, EXECUTORCH, tmp_path / 'm.pte')
    assert report.difference.largest['scores'] < 2e-6 and 'native_layer_norm' not in report.lines[0]
    images = blurred(3, seed=1).float()  # a batch that the file's size does not divide
    scores = ExportedModel(report.path)(images.numpy())['scores']
    assert abs(scores - graph_of(model)(images).detach().numpy()).max() < 2e-6
    samples = Samples(list(blurred()), exportable.meta, 2)
    report = export_file(exportable, EXECUTORCH, tmp_path / 'int8.pte', int8='static', samples=samples)
    assert 20 < signal_to_noise(model, report.path) < 60


def test_channels_last_for_executorch(tmp_path):
    """It leaves a LayerNorm outside of its parts."""
    model, images = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.LayerNorm((4, 2, 2))), torch.rand(4, 3, 16, 16)
    model, images = (value.to(memory_format=torch.channels_last) for value in (model, images))
    report = mmunorm.export(model, images[:1], tmp_path / 'm.pte')
    assert 'native_layer_norm' in report.lines[-1] and report.norms == 1
    assert mmunorm.compare(tmp_path / 'm.pte', model, images).largest['output'] < 1e-5
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


class Scores(nn.Module):
    """What each token takes from each of the others; two groups of tokens take nothing from each other."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        group = torch.arange(6) < 3
        self.register_buffer('bias', torch.randn(6, 6))
        self.register_buffer('cut', torch.where(group == group[:, None], 0., -1000.))

    def forward(self, x):
        return (self.query(x) @ self.key(x).transpose(-2, -1) + self.bias + self.cut).softmax(-1)


def test_scores_stay_in_float_for_executorch():
    """In 8 bits, the numbers between the groups would leave the others steps of 4."""
    torch.manual_seed(0)
    model, x = Scores().eval(), torch.randn(4, 6, 8)
    program = torch.export.export(model, (x, ), strict=False).module()
    with torch.no_grad():
        torch.testing.assert_close(quantize_graph(program, [(x.numpy(), )])(x), model(x), atol=0.05, rtol=0)


def test_a_swin_for_an_ethos_u(swin, tmp_path):
    exportable = prepare_export(swin, meta_of(swin))
    samples = Samples(list(blurred()), exportable.meta, 1)
    report = export_file(exportable, ETHOS_U, tmp_path / 'm.vela.tflite', int8=ETHOS_U.check(), samples=samples)
    files = ['m.vela.csv', 'm.vela.layers.csv', 'm.vela.tflite']
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert 0 < report.difference.largest['scores'] < 0.15  # of the integers that Vela read
    assert report.lines[2].startswith("Vela's ESTIMATE for Ethos_U") and ' ms, ' in report.lines[2]
    with pytest.raises(PreflightError, match='runs only on an Ethos-U; .* a .tflite file with the INT8 full'):
        ExportedModel(report.path)
    # The smaller chips take a Swin-T, not this one of 8 channels and an odd size. The files of before stay.
    with pytest.raises(PreflightError, match='cannot compile this model for ethos-u65-256 .*Conv2D'):
        export_file(exportable, ETHOS_U, report.path, int8='full', samples=samples, accelerator='ethos-u65-256')
    (tmp_path / 'm.tflite').write_bytes(b'not a model')
    with pytest.raises(PreflightError, match="Arm's Vela cannot compile this model for ethos-u85-512"):
        compile_file(tmp_path / 'm.tflite', tmp_path / 'm.vela.tflite', 'ethos-u85-512')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['m.tflite', *files]
    # Vela has no name for a BROADCAST_TO.
    (tmp_path / 'm.vela.layers.csv').write_text('Original Operator,Target\nNone,CPU\nMean,CPU\nNone,CPU\nAdd,NPU\n')
    assert ETHOS_U.report(report.path)[-1] == 'operators left to the CPU: 3, unknown to Vela 2, Mean 1'
