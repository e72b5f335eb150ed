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
from mmunorm.deploy import FORMATS, ExportedModel, prepare_export
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats.executorch import quantize_graph
from mmunorm.deploy.rewrite.pixels import fold_pixels
from mmunorm.fusion import FoldedLayerNorm, FoldedRMSNorm
from mmunorm.utils import PreflightError

from ..fusion import models
from .conftest import (
    Beside,
    blurred,
    fitted,
    folded,
    graph_of,
    meta_of,
    needs,
    normalizing,
    rewritten,
    signal_to_noise,
    small_swin,
    write,
)


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
    (small_swin, (37, 45), 2, True), (small_swin, (32, 32), 1, False), (models.vit_classifier, (32, 32), 2, True),
    (lambda: models.t2t_classifier(num_layers=1), (32, 32), 2, True)])
def test_graphs_for_chips_compute_what_the_stock_ones_do(make, size, number, is_folded):
    model = folded(make)[0] if is_folded else normalizing(make())
    dims, kinds = rewritten(graph_of(model.eval()), torch.rand(number, 3, *size) * 255)
    assert dims == 4 and not re.search('arange|roll|scaled_dot_product|im2col', ' '.join(kinds))


@pytest.fixture(scope='module')
def single(swin):
    """For one image. LiteRT converts it once for all tests."""
    return prepare_export(swin, meta_of(swin))


@pytest.fixture(scope='module')
def full(single, tmp_path_factory):
    return write(single, 'litert', tmp_path_factory.mktemp('full'), 'full')


def steps_of(path, kind, index=0):
    """Step and zero point of an input of each operator of a kind."""
    interpreter = Interpreter(
        str(path), experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    interpreter.allocate_tensors()
    return [interpreter._get_tensor_details(operator['inputs'][index], 0)['quantization']
            for operator in interpreter._get_ops_details() if operator['op_name'] == kind]


def test_integers_only(swin, full):
    assert signal_to_noise(swin, full.path) > 18 and not operators_of(full.path, in_float=True)
    _, detail = ExportedModel(full.path)._session.input_of('classify')
    assert detail['quantization'] == (1.0, -128)
    assert full.lines[0].startswith('usual in INT8: 20 to 40 dB')
    block = r'SwinBlockSequence_\d/SwinBlock_\d \(SNR after it \d+\.\d dB\)'
    assert re.match(f'loses most in {block}, {block}$', full.lines[1])
    assert re.match(r'operators: \d+, RESHAPE \d+, ', full.lines[2]) and len(full.lines) == 3
    # XNNPACK takes products whose second factor is symmetric.
    assert [zero for _, zero in steps_of(full.path, 'BATCH_MATMUL', 1)] == [0] * 4
    # -1000 between windows would leave the scores a step of 4.
    steps = steps_of(full.path, 'SOFTMAX')
    assert len(steps) == 2 and max(steps)[0] < 0.1


@pytest.mark.parametrize('kind, least', [('dynamic', 25), ('products', 20)])
def test_int8(swin, single, tmp_path, kind, least):
    report = write(single, 'litert', tmp_path, kind)
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


def test_attentions_that_share_what_is_added_to_their_scores(tmp_path, one_statistic):
    torch.manual_seed(0)
    images = torch.randn(8, 3, 32, 32)
    mmunorm.export(Masked(), images[:1], tmp_path / 'm.tflite', 'full', images)
    steps = steps_of(tmp_path / 'm.tflite', 'SOFTMAX')
    assert len(steps) == 2 and max(steps)[0] < 0.1


def test_norms_without_weights_in_8_bits(tmp_path, one_statistic):
    torch.manual_seed(0)
    beside = Beside()
    for name, norm in dict(padded=FoldedLayerNorm(32, 1e-5, is_padded=True), rms=FoldedRMSNorm(32, None),
                           centered=FoldedLayerNorm(32, 1e-5, is_centered=True, linear=True)).items():
        first = nn.Conv2d(3, 32, 4)
        if name == 'centered':
            first.weight.data -= first.weight.data.mean(0)
            first.bias.data -= first.bias.data.mean()
        # One token.
        beside[name] = nn.Sequential(first, nn.Flatten(1), nn.Unflatten(1, (1, 32)), norm, nn.Linear(32, 8))
    images = torch.randn(8, 3, 4, 4)
    exportable = as_exportable(beside, images[:1])
    for int8, least in ((None, 100), ('full', 25)):
        report = write(exportable, 'litert', tmp_path, int8, images if int8 else None)
        assert len(report.difference.snr) == 3 and min(report.difference.snr.values()) > least
    assert not operators_of(report.path, in_float=True)
    assert 'norms left: 3, 3 of them without weights' in str(report)


def test_what_is_refused(single, tmp_path):
    _, dynamic = folded(models.deit_classifier, dynamic=True)
    for model, name, how, option in (
            (dynamic, 'litert', {}, 'dynamic'), (single, 'executorch', dict(half=True), 'half'),
            (dynamic, 'executorch', {}, 'dynamic'), (single, 'ethos-u', dict(half=True, int8='full'), 'half')):
        with pytest.raises(PreflightError, match=f'--{option} is not supported by --format {name}'):
            write(model, name, tmp_path, **how)


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
for image in images:
    logits = classify(images=(image[None].astype(np.int16) - 128).astype(np.int8))['logits']
    assert 'torch' not in sys.modules and logits.dtype == np.int8
    print(logits.argmax())
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    scores = ExportedModel(full.path)(images.transpose(0, 3, 1, 2))['scores']
    assert list(map(int, done.stdout.split())) == list(scores.argmax(1))


def test_a_swin_in_executorch(tmp_path):
    """Its padding tokens follow a reshape, which XNNPACK loads in INT8 only if the range stays the same."""
    torch.manual_seed(0)
    model = fitted(small_swin(1, shift=False))
    report = write(prepare_export(model, meta_of(model), 2), 'executorch', tmp_path, 'static')
    assert 20 < signal_to_noise(model, report.path) < 60


def test_a_folded_norm_in_executorch(tmp_path):
    """For a batch that the file's size does not divide."""
    model = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2), FoldedLayerNorm(4, 1e-5), nn.Linear(4, 2)).eval()
    images = torch.rand(3, 3, 16, 16)
    report = mmunorm.export(model, images[:2], tmp_path / 'm.pte')
    assert b'native_layer_norm' not in report.path.read_bytes() and report.plain == 1
    assert mmunorm.compare(tmp_path / 'm.pte', model, images).largest['output'] < 2e-6


def test_channels_last_for_executorch(tmp_path):
    """It leaves a LayerNorm outside of its parts."""
    model, images = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.LayerNorm((4, 2, 2))), torch.rand(4, 3, 16, 16)
    model, images = (value.to(memory_format=torch.channels_last) for value in (model, images))
    report = mmunorm.export(model, images[:1], tmp_path / 'm.pte')
    assert b'native_layer_norm' in report.path.read_bytes() and report.norms == 1
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


def test_a_swin_for_an_ethos_u(single, full, tmp_path, one_statistic):
    report = write(single, 'ethos-u', tmp_path, FORMATS['ethos-u'].check(), accelerator='ethos-u85-256')
    files = ['m.vela.csv', 'm.vela.layers.csv', 'm.vela.tflite']
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert 0 < report.difference.largest['scores'] < 0.15  # of the integers that Vela read
    assert report.lines[2].startswith("Vela's ESTIMATE for Ethos_U85_256") and ' ms, ' in report.lines[2]
    with pytest.raises(PreflightError, match='runs only on an Ethos-U; .* a .tflite file with the INT8 full'):
        ExportedModel(report.path)
    # The smaller chips take a Swin-T, not this one of 8 channels and an odd size. The files of before stay.
    with pytest.raises(PreflightError, match="Arm's Vela cannot compile this model for ethos-u65-256 .*Conv2D"):
        compile_file(full.path, report.path, 'ethos-u65-256')
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    with pytest.raises(PreflightError, match="^accelerator must be one of ethos-u55-32, .*, got 'ethos-u86'"):
        write(single, 'ethos-u', tmp_path, 'full', accelerator='ethos-u86')
    # Vela has no name for a BROADCAST_TO.
    (tmp_path / 'm.vela.layers.csv').write_text('Original Operator,Target\nNone,CPU\nMean,CPU\nNone,CPU\nAdd,NPU\n')
    assert FORMATS['ethos-u'].report(report.path)[-1] == 'operators left to the CPU: 3, unknown to Vela 2, Mean 1'
