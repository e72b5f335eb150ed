"""Models of torch, timm, torchvision and transformers as files, without OpenMMLab."""
import itertools
import re
import resource
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from mmunorm import compare, convert_norms, export, fuse_norms
from mmunorm.deploy import ExportedModel
from mmunorm.deploy.api import as_exportable, unlike
from mmunorm.deploy.formats.onnx import OnnxSession
from mmunorm.deploy.graph import named_outputs
from mmunorm.deploy.rewrite.pixels import fold_pixels
from mmunorm.utils import PreflightError

from .conftest import Beside, needs, rewritten

HOW_TO = Path(__file__).parents[2] / 'docs/how_to/deployment.md'
VIT = partial(timm.create_model, 'vit_tiny_patch16_224', img_size=56, patch_size=8, embed_dim=16, depth=1, num_heads=2,
              num_classes=5)
MODELS = {
    'timm ViT': VIT, 'timm ViT with qk_norm': partial(VIT, qk_norm=True),
    'timm Swin': partial(timm.create_model, 'swin_tiny_patch4_window7_224', img_size=56, embed_dim=8, depths=(2, ),
                         num_heads=(2, ), num_classes=5),
    'torchvision ViT': partial(VisionTransformer, 56, 8, 1, 2, 16, 32, num_classes=5),
    'torchvision Swin': partial(SwinTransformer, [4, 4], 8, [2, 0], [1, 2], [7, 7], num_classes=5)}
IMAGES = torch.randn(4, 3, 56, 56, generator=torch.Generator().manual_seed(0))


def build(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


class Two(nn.Module):
    """Two tensors in a dict, one of them in a tuple."""

    def __init__(self, change=lambda x: x):
        super().__init__()
        self.layer, self.change = nn.Conv2d(3, 4, 8, 8), change

    def forward(self, x):
        x = self.layer(x)
        return dict(maps=(x, x.relu()), other=self.change(x.mean((2, 3))))


@pytest.fixture(autouse=True)
def _runtimes():
    needs('onnx')


@pytest.mark.parametrize('name, number', [(name, 1 if name == 'timm Swin' else 2) for name in MODELS])
def test_rewritten_for_chips(name, number):
    model = build(name)
    dims, kinds = rewritten(model, IMAGES[:number])
    assert dims <= 4
    attentions = sum('softmax' in kind for kind in kinds)
    layers = (nn.Linear, nn.MultiheadAttention)
    stock = sum(isinstance(module, layers) for module in model.modules())
    assert attentions and sum('linear' in kind for kind in kinds) == stock + 2 * attentions
    assert not any('roll' in kind or 'scaled_dot' in kind or 'unbind' in kind for kind in kinds)
    assert any('aten.mul' in kind for kind in kinds) == ('qk_norm' in name)  # the scale of queries is in their layer


def test_a_file_beside_its_model(tmp_path):
    model, path = build('timm ViT'), tmp_path / 'm.onnx'
    convert_norms(model, IMAGES)
    fuse_norms(model.eval(), example=IMAGES[:1])
    report = export(model, IMAGES[:2], path, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2))
    assert report.norms == 0 and report.difference.largest['output'] < 1e-5
    assert re.match(r'written: .*m.onnx, \d\.\d MB\nnorms left: 0\ncompared with torch on '
                    r'2 images of the example: SNR of output \d+\.\d dB$', str(report))
    model.train()
    found = compare(path, model, [IMAGES[:3], (IMAGES[3:], 'label')])
    assert found.largest['output'] < 1e-5 and found.snr['output'] > 90 and model.training
    assert str(found).startswith('output: largest difference')


def test_several_outputs_of_images_that_are_checked_before_they_run(tmp_path):
    model = Two().eval()
    export(model, IMAGES, tmp_path / 'm.onnx')
    assert list(compare(tmp_path / 'm.onnx', model, IMAGES).largest) == ['maps_0', 'maps_1', 'other']
    file = ExportedModel(tmp_path / 'm.onnx')
    assert file(IMAGES)['other'].shape == (4, 4)  # a tensor will do
    with pytest.raises(PreflightError, match=r'images must be \(N, 3, 56, 56\), got \(4, 56, 56, 3\)'):
        file(IMAGES.permute(0, 2, 3, 1).numpy())
    with pytest.raises(PreflightError, match=r'm.onnx returns maps_0, maps_1, other, and the model output'):
        compare(tmp_path / 'm.onnx', nn.Conv2d(3, 4, 8, 8), IMAGES)
    model.layer = nn.Conv2d(3, 5, 8, 8)
    with pytest.raises(PreflightError, match=r'maps_0 is \(4, 4, 7, 7\), and of Two \(4, 5, 7, 7\)'):
        compare(tmp_path / 'm.onnx', model, IMAGES)


@pytest.mark.parametrize('change, how, message', [
    (None, dict(path='m.caffe'), 'must have the suffix .*, got .*m.caffe'),
    (None, dict(path='none/m.onnx'), 'there is no folder .*none'),
    (None, dict(int8='static'), "int8='static' takes its ranges from images: give them as calibration"),
    (None, dict(int8='static', calibration=IMAGES[:, :, :8]), r'calibration must be batches of \(N, 3, 56, 56\), got'),
    (None, dict(example=IMAGES[0]), r'example must be a batch of images \(N, C, H, W\), got \(3, 56, 56\)'),
    (None, dict(example=IMAGES[:, :1]), r'Two does not take images of \(4, 1, 56, 56\)'),
    (None, dict(calibration=IMAGES), 'calibration is for INT8, and int8 is not given: one of static'),
    (None, dict(mean=(0.5, )), 'mean and std go together'),
    (None, dict(mean=0.5, std=0.5), r'mean must have 3 numbers from 0 to 1, one a channel, got 0.5'),
    (None, dict(mean=(0.5, ) * 3, std=(0., 1., 1.)), r'std must have 3 numbers above 0 and at most 1'),
    (None, dict(mean=(123., 116., 103.), std=(58., 57., 57.)), r'mean must have 3 numbers from 0 to 1'),  # of bytes
    (None, dict(int8=False), 'int8 of onnx must be one of static, external, got False'),
    (None, dict(int8='static', calibration=3), 'calibration must be batches of .*, got int'),
    (None, dict(int8='static', calibration=IMAGES.byte()), 'calibration must be images as .*, got torch.uint8'),
    (None, dict(int8='static', calibration=IMAGES / 0), 'calibration must be images as .*, got NaN or infinity'),
    (None, dict(example=IMAGES[:0]), r'example must be a batch of images .*, got \(0, 3, 56, 56\)'),
    (lambda x: x.no_such_thing, {}, 'Two does not take images of .*: AttributeError'),
    (lambda x: 'a', {}, 'returns other of type str'),
    (lambda x: x.mean().item(), {}, 'returns other of type float'),
    (lambda x: bool(x.any()), {}, 'returns other of type bool'),
    (lambda x: x.any(), {}, r'other of Two must have the 4 images as first dimension, got \(\)'),
    (lambda x: x[0, :2], {}, r'other of Two must have the 4 images as first dimension, got \(2,\)'),
    (lambda x: x / 0 * 0, {}, 'other of Two has NaN for the example'),
    (torch.rand_like, {}, 'other of Two differs between two runs on the same images'),
    (lambda x: x[:, x[0] > 0], {}, 'shape of other of Two depends on its input')])
def test_what_cannot_be_exported(tmp_path, change, how, message):
    torch.manual_seed(0)
    how = dict(example=IMAGES) | how
    model = Two(change or (lambda x: x))
    with pytest.raises(PreflightError, match=message):
        export(model, path=tmp_path / how.pop('path', 'm.onnx'), **how)
    assert not list(tmp_path.iterdir())


def test_a_model_of_another_type_becomes_a_file_of_float32(tmp_path):
    model, path = Two().half(), tmp_path / 'm.onnx'
    export(model, IMAGES[:1].half(), path, mean=torch.full((3, ), 0.5), std=np.full(3, 0.25))
    assert model.layer.weight.dtype == torch.half
    assert compare(path, model.float(), IMAGES).snr['other'] > 90


def test_endless_calibration_images_are_read_up_to_a_number_that_is_said(tmp_path, capsys):
    model, path = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(16, 2)).eval(), tmp_path / 'm.onnx'
    images = torch.randn(100, 3, 16, 16)
    report = export(model, images[:8], path, 'static', itertools.repeat((images, 'label')))
    assert report.images == '8 of 512 calibration images'
    assert 'export: calibrating on 64 batches' in capsys.readouterr().err
    assert export(model, images[:8], path, 'static', images.repeat(7, 1, 1, 1)).images == report.images


PIXELS = nn.functional.interpolate(torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), 32)
NORMALIZED = (PIXELS - 0.45) / 0.225


@pytest.mark.parametrize('images, doubt', [
    (NORMALIZED, '^$'), (NORMALIZED[1:] * 1.1, '^$'), (PIXELS, '% of the values of the example are outside of those'),
    (NORMALIZED * 0, '^100 % of the values'), (torch.randn(8, 3, 32, 32) / 10, '% of the values'),
    (255 * PIXELS, '% of the values'), (NORMALIZED * 20, '^the values of the example differ 20 times less than those'),
    (NORMALIZED[:1].repeat(8, 1, 1, 1), '^all 8 calibration images are equal')])
def test_calibration_images_that_do_not_look_like_the_example(images, doubt):
    assert re.search(doubt, unlike(NORMALIZED[:1], images))


def test_the_report_has_the_example_and_a_warning(tmp_path, capsys):
    model = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.Flatten(), nn.Linear(256, 10)).eval()
    report = export(model, NORMALIZED[:1], tmp_path / 'm.onnx', 'static', PIXELS)
    assert report.lines[0].startswith('warning: ') and report.lines[0][9:] in capsys.readouterr().err
    assert 'on the example: SNR of output ' in report.lines[2]


def test_outputs_whose_names_are_taken(tmp_path):
    class Named(nn.Module):
        def forward(self, x):
            return dict(images_out=x * 3, images=x * 2)

    export(Named(), IMAGES, tmp_path / 'm.onnx')
    assert list(compare(tmp_path / 'm.onnx', Named(), IMAGES).snr.values()) == [np.inf] * 2
    with pytest.raises(PreflightError, match='returns two tensors that a file would name a_0: rename a key'):
        named_outputs(dict(a_0=IMAGES, a=(IMAGES, IMAGES)))


def test_links_stay(tmp_path):
    (tmp_path / 'far').mkdir()
    for suffix in ('xml', 'bin'):
        (tmp_path / f'm.{suffix}').symlink_to(tmp_path / f'far/n.{suffix}')
    model = Two().eval()
    needs('openvino')
    export(model, IMAGES, tmp_path / 'm.xml')
    assert sorted(path.name for path in (tmp_path / 'far').iterdir()) == ['n.bin', 'n.xml']
    assert (tmp_path / 'm.xml').is_symlink() and compare(tmp_path / 'm.xml', model, IMAGES).snr['other'] > 90


def raises(error):
    def function(*args):
        raise error
    return function


run_onnx = OnnxSession.run


@pytest.mark.parametrize('name, function, message', [
    ('write_onnx', raises(ModuleNotFoundError("No module named 'rich.text'", name='rich.text')),
     '^exporting to ONNX Runtime needs the package rich, which is not installed'),
    ('write_onnx', raises(AssertionError()), r'^ONNX Runtime does not take Two: AssertionError \(.*test_export.py, '),
    ('OnnxSession.__init__', raises(RuntimeError('no kernel')), 'm.onnx cannot be loaded: RuntimeError: no kernel'),
    ('OnnxSession.run', raises(RuntimeError('method->execute() failed')),
     '^ONNX Runtime does not take Two: RuntimeError: method->execute'),
    ('OnnxSession.run', lambda self, arrays: [out * 1.01 for out in run_onnx(self, arrays)],
     'ONNX Runtime computes something else than Two on 4 images of the example: SNR of maps_0 40.0 dB, .* 60 dB')])
def test_what_fails_in_a_converter_or_runtime(tmp_path, monkeypatch, name, function, message):
    monkeypatch.setattr(f'mmunorm.deploy.formats.onnx.{name}', function)
    (tmp_path / 'm.onnx').write_text('old')
    with pytest.raises(PreflightError, match=message):
        export(Two(), IMAGES, tmp_path / 'm.onnx')
    assert [path.read_text() for path in tmp_path.iterdir()] == ['old']
    if 'computes' in message:  # a file in INT8 is written, and its report has the SNR
        report = export(Two(), IMAGES[:1], tmp_path / 'm.onnx', 'static', IMAGES)
        assert 'compared with torch on 4 of 4 calibration images: SNR of maps_0 ' in str(report)


@pytest.mark.slow
def test_an_interpolation_that_litert_computes_otherwise(tmp_path):
    needs('litert')

    class Enlarged(nn.Conv2d):
        def forward(self, x):
            return nn.functional.interpolate(super().forward(x), scale_factor=1.3, mode='nearest')

    model = Enlarged(3, 8, 3, padding=1).eval()
    with pytest.raises(PreflightError, match='^LiteRT computes something else than Enlarged .* SNR of output '):
        export(model, IMAGES[:1, :, :16, :16], tmp_path / 'm.tflite')
    assert not list(tmp_path.iterdir())


def attention(three, mask):
    """A model whose images attend to themselves, in three dimensions or in four."""
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 8, 14, 14)
            self.register_buffer('mask', mask)

        def forward(self, x):
            x = self.patches(x).flatten(2).mT
            x = x if three else x[:, None]
            return nn.functional.scaled_dot_product_attention(x, 2 * x, 3 * x, attn_mask=self.mask).flatten(1)

    torch.manual_seed(0)
    return Attention().eval()


MASK = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.5
MASK[3] = False  # its token attends to nothing
LOW = torch.where(MASK, 0., -torch.inf)
LOWEST = torch.where(MASK, 0., torch.finfo(torch.float).min)  # that of transformers; its token attends to all


def test_masks_of_attention_in_onnx(tmp_path):
    model = Beside(dict(cut=attention(True, MASK), added=attention(False, torch.randn(16, 16))))
    export(model, IMAGES, tmp_path / 'm.onnx')
    found = compare(tmp_path / 'm.onnx', model, IMAGES).snr
    assert len(found) == 2 and min(found.values()) > 100


class Scaled(nn.Module):
    """Layers whose output is scaled, and sums in five dimensions."""

    def __init__(self):
        super().__init__()
        self.patches, self.first, self.last = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain, self.bias = nn.Parameter(torch.full((1, 1, 1), 0.3)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = self.first(x) * 0.5
        x = self.last(x.tanh()) * self.gain
        x = x.view(len(x), 7, 7, 1, 8) + self.bias
        return torch.add(x, self.bias, alpha=2) + 1 + self.bias[:7, None, None]


class Cross(nn.Module):
    """Attention to other tokens, whose weights torch stores as one tensor, and a layer with a computed weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.attention = nn.Conv2d(3, 16, 14, 14), nn.MultiheadAttention(16, 2, batch_first=True)
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        y = nn.functional.linear(self.attention(x, x[:, ::2], x[:, ::2], need_weights=False)[0],
                                 self.weight * x.mean())
        return (y * 0.5).unflatten(2, (2, 8))[:, :, 1]


class Rolled(nn.Module):

    def forward(self, x):
        return torch.roll(x, 5) + torch.roll(x, (1, 2), (2, 3))


class Pooled(nn.Module):
    """A learned query that attends to the tokens, as in SigLIP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.query = nn.Conv2d(3, 16, 14, 14), nn.Parameter(torch.randn(1, 2, 1, 8))

    def forward(self, x):
        x = self.patches(x).flatten(2).mT.unflatten(2, (2, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(self.query.expand(len(x), -1, -1, -1), x, x).flatten(1)


@pytest.mark.parametrize('make, number, absent, atol', [
    (Scaled, 4, 'mul', 1e-6), (Cross, 1, 'split|unbind', 1e-5), (Rolled, 1, 'roll', 1e-6), (Pooled, 1, 'dot', 1e-6), *(
        (partial(attention, three, mask), 4, 'dot', 1e-5) for three, mask in (
            (False, LOW), (True, MASK), (True, LOW), (True, LOWEST), (True, torch.randn(16, 16))))])
def test_operators_for_chips(make, number, absent, atol):
    assert not any(re.search(absent, kind) for kind in rewritten(make().eval(), IMAGES[:number], atol)[1])


@pytest.mark.slow
def test_a_learned_query_in_dynamic_range(tmp_path):
    needs('litert')
    model = Pooled().eval()
    export(model, IMAGES[:1], tmp_path / 'm.tflite', 'dynamic')
    assert compare(tmp_path / 'm.tflite', model, IMAGES).snr['output'] > 20


def test_arguments_in_another_order(tmp_path):
    with pytest.raises(TypeError, match='^model: must be an nn.Module, got Tensor'):
        export(IMAGES, Two(), tmp_path / 'm.onnx')
    for function in export, compare:
        with pytest.raises(PreflightError, match='^path: must be that of a file, such as model.onnx, got '):
            function(Two(), tmp_path / 'm.onnx', IMAGES)


def test_padding_on_one_side(tmp_path):
    needs('openvino')
    images = IMAGES[..., :16, :12]
    torch.manual_seed(0)
    model = SwinTransformer([4, 4], 8, [2], [1], [2, 2], num_classes=5).eval()
    convert_norms(model, images)
    fuse_norms(model.eval(), example=images[:1])
    export(model, images[:1], tmp_path / 'm.xml')
    assert compare(tmp_path / 'm.xml', model, images).largest['output'] < 1e-5


def test_a_model_that_writes_to_its_input(tmp_path):
    model, images = nn.Sequential(nn.Hardswish(inplace=True), nn.Conv2d(3, 4, 8, 8)), IMAGES.clone()
    export(model, images, tmp_path / 'm.onnx')
    assert compare(tmp_path / 'm.onnx', model, images).largest['output'] < 1e-5 and images.equal(IMAGES)
    with torch.inference_mode():
        graph = as_exportable(model, images, (0.5, ) * 3, (0.25, ) * 3).graph
    assert fold_pixels(graph, images)(images)[0].allclose(graph(images)[0], atol=1e-5)


def test_weights_that_are_computed_stay_in_float(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 64, 8, 8), timm.layers.StdConv2d(64, 32, 3)).eval()
    export(model, IMAGES, tmp_path / 'm.onnx', 'static', IMAGES)
    assert compare(tmp_path / 'm.onnx', model, IMAGES).snr['output'] > 90


@pytest.mark.slow
def test_a_disk_that_is_full_in_litert(tmp_path):
    """The converter's own function that writes a file ends the process then."""
    needs('litert')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match='File too large'):
            export(nn.Conv2d(3, 64, 8), torch.rand(1, 3, 8, 8), tmp_path / 'm.tflite')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


class Pools(nn.Module):
    """Maximum poolings that pad with -inf, and a layer that is 0, as of a detector on a level without objects."""

    def __init__(self):
        super().__init__()
        pools = [layer for channels in (3, 8) for layer in (nn.Conv2d(channels, 8, 3, 2), nn.MaxPool2d(3, 2, 1))]
        self.pools, self.dead = nn.Sequential(*pools, nn.Flatten()), nn.Conv2d(3, 8, 8, 8)
        self.dead.bias.data.fill_(-1000)
        self.after_dead, self.linear = nn.Conv2d(8, 8, 7), nn.Linear(80, 4)

    def forward(self, x):
        return self.linear(torch.cat([self.pools(x), self.after_dead(self.dead(x).relu()).flatten(1)], 1))


@pytest.mark.slow
def test_infinite_and_zero_ranges_in_integers(tmp_path):
    """An infinite step size would leave nothing, and with a tiny one the next layer's bias would overflow."""
    needs('litert')
    torch.manual_seed(0)
    model, path, images = Pools().eval(), tmp_path / 'm.tflite', IMAGES
    export(model, images[:1], path, 'full', images)
    assert compare(path, model, images).snr['output'] > 15


@pytest.mark.slow
def test_pixels_of_one_channel_in_int8(tmp_path):
    needs('litert')
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 8, 8), nn.Flatten(), nn.Linear(196, 4)).eval()
    path, images = tmp_path / 'm.tflite', IMAGES[:, :1].tanh()
    export(model, images[:1], path, 'products', images[:1], mean=(0.5, ), std=(0.25, ))
    assert compare(path, model, images[:1]).snr['output'] > 20


@pytest.mark.slow
def test_the_how_to(tmp_path, monkeypatch, capsys):
    """Its block with a small model of each family; in INT8, of timm alone."""
    needs('litert')
    monkeypatch.chdir(tmp_path)
    block, = re.findall(r'```python\n(import mmunorm\n.*?)```', HOW_TO.read_text(), re.DOTALL)
    in_float = block.partition("mmunorm.export(model, images[:1], 'model.tflite'")[0]
    exec(block, dict(model=build('timm ViT'), images=IMAGES))
    others = [SwinTransformer([4, 4], 8, [1, 1], [1, 2], [7, 7])]
    if find_spec('transformers'):
        import transformers
        others.append(transformers.ViTForImageClassification(transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=56,
            patch_size=8)))
    for model in others:
        exec(in_float, dict(model=model, images=IMAGES))
    assert capsys.readouterr().out.count('largest difference') == 2 + len(others)
