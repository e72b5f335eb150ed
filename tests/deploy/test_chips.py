"""Files for compilers of chips, each in the vendor's own Python and simulator; and ONNX files for other compilers."""
import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mmunorm
from mmunorm.deploy import FORMATS, ExportedModel, export_file, prepare_export
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats.chip import Chip
from mmunorm.deploy.formats.onnx import lower_opset
from mmunorm.deploy.formats.qnn import quantize_for_qnn
from mmunorm.deploy.formats.sophgo import keep_affine
from mmunorm.deploy.preprocessing import Samples
from mmunorm.deploy.rewrite.operators import for_chips
from mmunorm.deploy.tasks import batch_of
from mmunorm.deploy.vendors import process
from mmunorm.deploy.vendors.graph import DIMENSIONS, for_compiler, images_for, join_padding, outputs_of
from mmunorm.deploy.vendors.process import Vendor, Worker
from mmunorm.utils import PreflightError

from ..fusion import models
from . import detectors
from .conftest import SHAPE, blurred, fitted, meta_of, needs, normalizing, operators_in, signal_to_noise, write

CHIPS = {name: form for name, form in FORMATS.items() if isinstance(form, Chip)}

needs('onnx')

import onnx

SCRIPT = '''
import os, sys
sys.path.insert(0, {folder!r})
from protocol import serve

class Compiler:
    def double(self, *arrays, factor=2):
        print('printed by Python')
        os.system('echo printed by a program')
        return dict(factor=factor), [array * factor for array in arrays]

    def fail(self):
        print('E load_onnx: the operator Foo is missing')
        sys.exit(1)

    def crash(self):
        sys.stderr.write('Assert: no such layer')
        sys.stderr.flush()
        os._exit(3)

serve(Compiler())
'''


@dataclass(frozen=True)
class Made(Vendor):
    """A vendor with a script of a test."""
    folder: Path = Path()

    @property
    def script(self):
        return self.folder / 'worker.py'


@pytest.fixture
def worker(tmp_path):
    (tmp_path / 'worker.py').write_text(SCRIPT.format(folder=str(Path(process.__file__).parent)))
    return Worker(Made('made', 'numpy', 'numpy 1', tmp_path))


def test_arrays_and_arguments_pass(worker):
    arrays = np.arange(6, dtype=np.float32).reshape(2, 3), np.int64(3), np.zeros((0, 4), np.uint8)
    for factor in (2, 5):  # one process for all calls
        header, outs = worker.call('double', *arrays, factor=factor)
        assert header == dict(factor=factor) and [out.dtype for out in outs] == ['float32', 'int64', 'uint8']
        for out, array in zip(outs, arrays, strict=True):
            np.testing.assert_array_equal(out, array * factor)
    assert worker.log.read_text().split('\n')[:2] == ['printed by Python', 'printed by a program']


def test_what_a_vendor_prints_is_in_the_error(worker):
    with pytest.raises(PreflightError, match=r'numpy 1 fails: E load_onnx: the operator Foo is missing \(SystemExit: '
                                             r'1\); all that it printed: \S+\.log$') as error:
        worker.call('fail')
    assert 'the operator Foo' in Path(str(error.value).rpartition(' ')[2]).read_text()
    assert worker.call('double')[0] == dict(factor=2)  # it goes on
    with pytest.raises(PreflightError, match='numpy 1 ended with exit code 3: .*Assert: no such layer'):
        worker.call('crash')


def test_a_process_ends_with_its_session(worker):
    worker.call('double')
    assert worker.process.poll() is None
    worker.close()
    assert worker.process.returncode == 0 and not Path(worker.folder.name).exists()


@pytest.mark.parametrize('name', CHIPS)
def test_a_missing_package(name, tmp_path, monkeypatch):
    vendor = CHIPS[name].vendor
    monkeypatch.delenv(vendor.variable, raising=False)
    monkeypatch.setattr(process, 'find_spec', lambda module: None)
    monkeypatch.setattr(process, 'ROOT', tmp_path)
    model = nn.Conv2d(3, 4, 3)
    with pytest.raises(PreflightError) as error:
        mmunorm.export(model, torch.rand(1, 3, 8, 8), tmp_path / f'm{CHIPS[name].suffixes[0]}')
    assert re.fullmatch(rf"missing: {vendor.package}; install with 'make \.venv-{name}/\.installed' in a clone of "
                        rf'mmunorm, or set {vendor.variable} to the Python that has it\.', str(error.value))
    for file in CHIPS[name].files(tmp_path / f'm{CHIPS[name].suffixes[0]}'):
        file.write_bytes(b'')
    with pytest.raises(PreflightError, match=f'^missing: {vendor.package}; install with'):
        mmunorm.compare(tmp_path / f'm{CHIPS[name].suffixes[0]}', model, torch.rand(1, 3, 8, 8))


def test_which_python(tmp_path, monkeypatch):
    vendor = Vendor('rknn', 'rknn', 'rknn-toolkit2 2.5.0')
    monkeypatch.delenv('MMUNORM_RKNN_PYTHON', raising=False)
    monkeypatch.setattr(process, 'ROOT', tmp_path)
    monkeypatch.setattr(process, 'find_spec', lambda module: None)
    (tmp_path / '.venv-rknn/bin').mkdir(parents=True)
    (tmp_path / '.venv-rknn/.installed').touch()
    assert vendor.python() == tmp_path / '.venv-rknn/bin/python'
    monkeypatch.setattr(process, 'find_spec', lambda module: module == 'rknn' or None)
    assert os.access(vendor.python(), os.X_OK) and tmp_path not in vendor.python().parents
    monkeypatch.setenv('MMUNORM_RKNN_PYTHON', '/nowhere/python')
    with pytest.raises(PreflightError, match='MMUNORM_RKNN_PYTHON must be a Python with rknn-toolkit2 2.5.0, and there '
                                             'is no program /nowhere/python'):
        vendor.python()


def on_the_host(model, arrays, normalizes):
    """The outputs of a graph for compilers, with the host's part around it."""
    images = torch.from_numpy(images_for(arrays, model.meta, normalizes))
    outs = model.graph(images)
    return outputs_of([out.numpy() for out in (outs if isinstance(outs, tuple) else (outs, ))], model.meta)


@pytest.mark.parametrize('normalizes', [False, True])
def test_a_classifier_for_a_compiler(exportable, normalizes):
    """Which takes RGB: the file swaps the channels, whoever normalizes. Windows have few dimensions."""
    model = for_compiler(exportable, normalizes)
    assert max(value.dim() for node in model.graph.graph.nodes
               if isinstance(value := node.meta.get('val'), torch.Tensor)) <= DIMENSIONS
    assert model.meta['shape'] == [1, 3, *SHAPE] and (model.meta['host']['mean'] is None) is normalizes
    images = blurred(1, seed=3).float()
    expected = exportable.graph(images).numpy()
    assert expected.std() > 0.01
    found, = on_the_host(model, [images.numpy()], not normalizes)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize('padding, value', [((0, 0, 0, 2, 0, 2), 0.), ((1, 2, 3, 0), 0.5), ((0, 3), None)])
def test_padding_is_a_concatenation(padding, value):
    """Rockchip's compiler stops at the windows of a small map, such as those of a Swin on digits."""
    class Padded(nn.Module):
        def forward(self, x):
            return nn.functional.pad(nn.functional.pad(x, padding, value=value), (1, 1, 0, 0), 'reflect')

    x = torch.randn(2, 3, 2, 5)
    module = join_padding(for_chips(torch.export.export(Padded(), (x, ))))
    assert [node.args[2] for node in module.graph.nodes if node.target is torch.ops.aten.pad.default] == ['reflect']
    assert torch.equal(module(x), Padded()(x))


def test_heads_of_one_image_keep_its_dimension():
    """Sophgo's compiler stops at attention whose heads are split in three dimensions."""
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    module = for_chips(torch.export.export(Attention(), (torch.randn(1, 16, 8), )))
    permuted = [len(node.args[1]) for node in module.graph.nodes if node.target is torch.ops.aten.permute.default]
    assert permuted == [4] * 4


def test_maps_of_a_padded_image():
    """The host writes the padding, which is that of torch after the normalization."""
    model = normalizing(detectors.retinanet())
    model.data_preprocessor.pad_value = 1.5
    exportable = prepare_export(model, meta_of(model, (64, 64), 'features'))
    arrays = batch_of([np.random.default_rng(0).integers(0, 256, (3, 40, 64), dtype=np.uint8)], exportable.meta)
    expected = exportable.graph(*map(torch.from_numpy, arrays))
    for normalizes in (False, True):
        compiled = for_compiler(exportable, normalizes)
        assert compiled.graph.inputs == ('images', )
        for found, exact in zip(on_the_host(compiled, arrays, not normalizes), expected, strict=True):
            assert exact.std() > 0
            np.testing.assert_allclose(found, exact.numpy(), rtol=0, atol=2e-4)


def test_what_compilers_do_not_take(swin):
    with pytest.raises(PreflightError, match='--dynamic is not supported by compilers of chips'):
        for_compiler(prepare_export(swin, meta_of(swin), dynamic=True))
    model = normalizing(detectors.retinanet())
    with pytest.raises(PreflightError, match='do not take whole detectors: --parts backbone exports'):
        for_compiler(prepare_export(model, meta_of(model, (64, 64), 'detector')))


class WithLn(nn.Module):
    """A transformer block's parts, with norms that have no factor in one case."""

    def __init__(self, affine=True):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16, elementwise_affine=affine)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)
        if affine:
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, images):
        x = self.stem(images).flatten(2).transpose(1, 2)
        y = self.norm(x)
        return self.head((x + self.attention(y, y, y, need_weights=False)[0]).mean(1))


@pytest.fixture(scope='module')
def external(tmp_path_factory):
    """A function that exports a model with a LayerNorm, folded, once: its images, the model and the report."""
    @cache
    def write_once(affine=True, fold=True):
        model, images = WithLn(affine).eval(), torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        if affine:
            nn.init.normal_(model.norm.bias)
        return images, model, mmunorm.export(
            model, images[:1], tmp_path_factory.mktemp('external') / 'm.onnx', int8='external', fold=fold,
            mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))

    return write_once


@pytest.mark.parametrize('affine', [True, False])
def test_an_onnx_file_for_other_compilers(affine, external):
    images, model, report = external(affine)
    assert report.difference.snr['output'] > 90
    assert mmunorm.compare(report.path, model, images).snr['output'] > 90
    content, kinds = onnx.load(report.path), operators_in(report.path)
    assert kinds['LayerNormalization'] == 1 and not {'Sub', 'Div', 'Pow', 'Sqrt'} & kinds.keys()  # nor the pixels
    assert content.opset_import[0].version == 18 and content.ir_version == 8  # which older packages take


@pytest.mark.parametrize('affine', [True, False])
def test_sophgos_compiler_sees_a_factor_and_a_summand(affine, external, tmp_path):
    """It leaves out those of 1 and 0; others stay as they are."""
    images, model, report = external(affine, not affine)
    keep_affine(shutil.copy(report.path, tmp_path))
    graph = onnx.load(tmp_path / 'm.onnx').graph
    norm, = (node for node in graph.node if node.op_type == 'LayerNormalization')
    factor, summand = (onnx.numpy_helper.to_array(tensor) for name in norm.input[1:] for tensor in graph.initializer
                       if tensor.name == name)
    if affine:
        assert np.array_equal(factor, model.norm.weight.detach()) and np.array_equal(summand, model.norm.bias.detach())
    else:
        assert (factor != 1).all() and np.abs(factor - 1).max() < 2e-7 and 0 < summand.min() == summand.max() < 1e-29
    assert mmunorm.compare(tmp_path / 'm.onnx', model, images).snr['output'] > 90


@pytest.mark.parametrize('fold', [True, False])
def test_attention_of_a_folded_model_on_a_rockchip(fold, tmp_path, monkeypatch):
    """In INT8, keys and values lose their mean over each image."""
    images, compiled, rknn = torch.rand(1, 3, 40, 40), [], FORMATS['rknn']
    monkeypatch.setattr(type(rknn), 'compile', lambda self, model, *args: compiled.append(model.graph))
    model = WithLn().eval()
    if fold:
        mmunorm.fuse_norms(model, example=images)
    exportable = as_exportable(model, images, None, None)
    for options in (dict(int8=None), dict(int8='static'), dict(int8='static', center_attention=False)):
        rknn.export(exportable, tmp_path / 'm.rknn', **options)
    means = [sum(node.target is torch.ops.aten.mean.dim
                 for node in torch.export.export(graph, (images, ), strict=False).graph.nodes) for graph in compiled]
    assert means == [1, 3 if fold else 1, 1]
    for graph in compiled:
        torch.testing.assert_close(graph(images), (model(images), ), rtol=1e-4, atol=1e-5)


def test_norms_of_equal_weights(tmp_path):
    """QNN fails at a scale that is quantized as a bias, as where the windows of a folded Swin add 1."""
    first, second = nn.LayerNorm(8), nn.LayerNorm(8)
    nn.init.ones_(first.bias)
    file = tmp_path / 'm.onnx'
    mmunorm.export(nn.Sequential(first, nn.Linear(8, 8), second), torch.randn(1, 3, 4, 8), file, fold=False)
    names = [name for node in onnx.load(file).graph.node if node.op_type == 'LayerNormalization'
             for name in node.input[1:]]
    assert len(set(names)) == len(names) >= 3


def test_an_older_opset(external, tmp_path):
    images, model, report = external()
    lower_opset(shutil.copy(report.path, tmp_path))
    content = onnx.load(tmp_path / 'm.onnx')
    onnx.checker.check_model(content, full_check=True)
    assert content.opset_import[0].version == 17 and 'ReduceMean' in operators_in(tmp_path / 'm.onnx')
    assert mmunorm.compare(tmp_path / 'm.onnx', model, images).snr['output'] > 90


def test_a_wrong_file_for_other_compilers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr('mmunorm.deploy.formats.onnx.outputs_of', lambda outs, meta: [out * 1.01 for out in outs])
    with pytest.raises(PreflightError, match='computes something else'):
        mmunorm.export(nn.Conv2d(3, 4, 4), torch.rand(1, 3, 16, 16), tmp_path / 'm.onnx', int8='external')
    assert not (tmp_path / 'm.onnx').exists()


def test_onnx_runtime_prepares_our_files_for_qnn(exportable, tmp_path):
    """It failed at a file with metadata_props."""
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.execution_providers.qnn import qnn_preprocess_model
    report = write(exportable, 'onnx', tmp_path, 'external')
    assert qnn_preprocess_model(report.path, tmp_path / 'prepared.onnx')
    assert 'Gelu' in operators_in(tmp_path / 'prepared.onnx')
    assert ExportedModel(tmp_path / 'prepared.onnx').meta['task'] == 'classifier'  # our metadata, too

    images = [dict(images=image[None].float().numpy()) for image in blurred(2)]
    narrow, *wide = (node.output[0] for node in onnx.load(tmp_path / 'prepared.onnx').graph.node
                     if node.op_type == 'Softmax')
    own = {narrow: [dict(quant_type=QuantType.QUInt8)]}  # stays beside wide_attention
    bits = {onnx.TensorProto.UINT8: 8, onnx.TensorProto.UINT16: 16}
    for options, expected in ((dict(), (8, 8)), (dict(wide_attention=True), (16, 16)),
                              (dict(wide_attention=True, init_overrides=own), (8, 16))):
        shutil.copy(report.path, tmp_path / 'int8.onnx')
        quantize_for_qnn(tmp_path / 'int8.onnx', iter(images), **options)
        graph = onnx.load(tmp_path / 'int8.onnx').graph
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        found = {node.input[0]: bits[types[node.input[2]]] for node in graph.node if node.op_type == 'QuantizeLinear'
                 and node.input[0] in (narrow, *wide)}
        assert wide and found == dict(zip((narrow, *wide), expected, strict=True))


def test_an_unknown_option_is_named(tmp_path):
    with pytest.raises(PreflightError, match='processor is not an option of the format onnx'):
        mmunorm.export(WithLn(), torch.rand(1, 3, 16, 16), tmp_path / 'm.onnx', processor='bm1688')


def test_two_tables_of_layers_for_a_bm1688(tmp_path):
    with pytest.raises(PreflightError, match='wide_attention and search both choose layers'):
        FORMATS['sophgo'].compile(None, tmp_path / 'm.bmodel', iter(()), True, dict(
            wide_attention=True, search='search_qtable'))


@pytest.fixture(params=CHIPS)
def chip(request):
    """The name of a format whose vendor's package is installed."""
    try:
        CHIPS[request.param].vendor.python()
    except PreflightError as error:
        pytest.skip(str(error))
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize('affine', [True, False])
def test_a_small_model_in_a_simulator(chip, affine, tmp_path):
    """LayerNorms with and without a factor, on images that the ranges are not of."""
    model, images = WithLn(affine).eval(), torch.rand(12, 3, 16, 16)
    path, how = tmp_path / f'm{CHIPS[chip].suffixes[0]}', dict(mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))
    report = mmunorm.export(model, images[:1], path, int8='static', calibration=images[:8], **how)
    assert sorted(tmp_path.iterdir()) == sorted(CHIPS[chip].files(path))
    found = mmunorm.compare(path, model, images[8:])
    assert 20 < report.difference.snr['output'] < 60 and found.snr['output'] > 20
    if affine:
        half = mmunorm.export(model, images[:1], path, **how)
        assert half.difference.snr['output'] > 40


class Map(nn.Module):
    """Tokens, a map, and a LayerNorm without a factor: Sophgo's compiler failed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear, self.norm = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 32), nn.LayerNorm(
            32, elementwise_affine=False)

    def forward(self, images):
        x = self.conv(images).permute(0, 2, 3, 1).reshape(1, -1, 32)
        return self.norm((x + self.linear(x)).reshape(1, 8, 8, 32))


@pytest.mark.slow
def test_a_map_in_a_simulator(chip, tmp_path):
    images = torch.rand(4, 3, 32, 32)
    report = mmunorm.export(Map().eval(), images[:1], tmp_path / f'm{CHIPS[chip].suffixes[0]}', int8='static',
                            calibration=images)
    assert report.difference.snr['output'] > 20


@pytest.mark.slow
def test_a_swin_in_a_simulator(chip, tmp_path):
    """And with attention in more than 8 bits, also under the mask of shifted windows: its scores follow a sum."""
    swin = models.swin_classifier(arch=dict(embed_dims=8, depths=[1, 2], num_heads=[2, 4]))
    swin.data_preprocessor.to_rgb = True
    swin = fitted(swin)
    exportable, snr, operators = prepare_export(swin, meta_of(swin)), [], []
    for options in ({}, dict(wide_attention=True))[:1 if chip == 'rknn' else 2]:
        report = write(exportable, chip, tmp_path, 'static', **options)
        assert signal_to_noise(swin, report.path) > 15
        snr.append(report.difference.snr['scores'])
        facts = CHIPS[chip].facts(report.path)
        operators.append(facts.get('by_operator', facts.get('operators')))
    if chip != 'rknn':
        assert snr[1] > snr[0] and (operators[1] == operators[0]) == (chip == 'qnn')


@pytest.mark.slow
def test_maps_in_a_simulator(chip, tmp_path):
    """Several outputs keep their order."""
    model = normalizing(detectors.retinanet())
    exportable = prepare_export(model, meta_of(model, (64, 64), 'features'))
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 64, 40), dtype=np.uint8)
    report = export_file(exportable, CHIPS[chip], tmp_path / f'm{CHIPS[chip].suffixes[0]}', int8='static',
                         samples=Samples(list(images), exportable.meta, 1))
    assert len(report.difference.snr) > 1 and min(report.difference.snr.values()) > 15
