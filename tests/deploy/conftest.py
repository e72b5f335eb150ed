from collections import Counter

import pytest
import torch
from torch import nn

from mmunorm import fuse_norms
from mmunorm.deploy import FORMATS, ExportedModel, export_file, prepare_export
from mmunorm.deploy.formats import litert
from mmunorm.deploy.preprocessing import Samples
from mmunorm.deploy.rewrite.operators import for_chips
from mmunorm.deploy.tasks import graph_of
from mmunorm.norms import OfflineNorm

from ..fusion import models

SHAPE = (37, 45)  # windows of 4 tokens of 4 pixels are padded


def needs(*names):
    """Skips a test, or at its top a file, without all packages of these formats."""
    for name in names:
        for package in FORMATS[name].packages + FORMATS[name].int8_packages:
            pytest.importorskip(package)


def blurred(number=8, seed=0):
    """Images, uint8 `(number, 3, h, w)`."""
    small = torch.rand(number, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) * 255
    return torch.nn.functional.interpolate(small, SHAPE, mode='bicubic').clamp(0, 255).byte()


def normalizing(model, **randomize):
    """A classifier that subtracts 120 from its pixels and divides them by 60, its norms with random statistics."""
    model.data_preprocessor.register_buffer('mean', torch.full((3, 1, 1), 120.), False)
    model.data_preprocessor.register_buffer('std', torch.full((3, 1, 1), 60.), False)
    model.data_preprocessor._enable_normalize = True
    return models.randomize(model, gamma='none', **randomize)


def folded(make, size=(32, 32), **how):
    """A classifier without norms, and what is exported of it."""
    model = normalizing(make())
    fuse_norms(model, strict=True)
    return model, prepare_export(model, meta_of(model, size), **how)


def write(exportable, name, folder, int8=None, images=None, **how):
    """Writes a file; the ranges of INT8 are those of images, by default 8 of a classifier."""
    form, (batch, _, height, width) = FORMATS[name], exportable.meta['shape']
    samples = () if images is None else [(part.numpy(), ) for part in images.split(batch)]
    if images is None and form.needs_images(int8):
        samples = Samples(list(blurred()[..., :height, :width]), exportable.meta, batch)
    folder.mkdir(exist_ok=True)
    return export_file(exportable, form, folder / f'm{form.suffixes[0]}', int8=int8, samples=samples, **how)


def signal_to_noise(model, path, size=SHAPE):
    """Of the logarithms of probabilities, in dB, on images that the ranges were not taken from."""
    images = blurred(6, seed=1)[..., :size[0], :size[1]].float()
    with torch.no_grad():
        exact = graph_of(model)(images).log()
    got = torch.from_numpy(ExportedModel(path)(images.numpy())['scores']).log()
    exact, got = (logits - logits.mean(1, keepdim=True) for logits in (exact, got))
    return (10 * torch.log10(exact.square().sum() / (got - exact).square().sum())).item()


def meta_of(model, shape=SHAPE, task='classifier'):
    return dict(task=task, model=type(model).__name__, classes=['a', 'b', 'c'], steps=[], divisor=4, bgr=True,
                shape=[1, 3, *shape])


def operators_in(path):
    """The number of each operator in an ONNX file."""
    import onnx
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def fitted(model):
    """A folded classifier whose norms had the statistics of what they read."""
    model = normalizing(model)

    def measure(norm, args):
        norm.running_var.copy_(args[0].flatten(0, -2).square().mean(0))

    handles = [module.register_forward_pre_hook(measure) for module in model.modules()
               if isinstance(module, OfflineNorm)]
    with torch.no_grad():
        graph_of(model)(blurred().float())
    for handle in handles:
        handle.remove()
    fuse_norms(model, strict=True)
    return model


def swin_backbone(stages=2, shift=True, **backbone):
    """A block a stage, the first of them with a shift or not, and a patch merging between."""
    return models.swin_backbone(arch=dict(embed_dims=8, depths=[1] * stages, num_heads=[2, 4][:stages]),
                                stage_cfgs=[dict(block_cfgs=dict(shift=shift)), {}][:stages], **backbone)


def small_swin(stages=2, shift=True):
    return models.classifier(swin_backbone(stages, shift, out_indices=(stages - 1, )), 8 * stages)


def rewritten(model, images, atol=1e-6):
    """The most dimensions of a tensor, and the operators' names, of a model's graph for chips, which computes the same.
    """
    with torch.no_grad():
        graph = for_chips(torch.export.export(model, (images, ), strict=False))
        torch.testing.assert_close(graph(images), model(images), rtol=0, atol=atol)
    values = (node.meta.get('val') for node in graph.graph.nodes)
    dims = max(value.dim() for value in values if isinstance(value, torch.Tensor))
    return dims, [str(node.target) for node in graph.graph.nodes]


class Beside(nn.ModuleDict):
    """Models that take the same images as one, which becomes one file."""

    def forward(self, x):
        return {name: model(x) for name, model in self.items()}


@pytest.fixture
def one_statistic(monkeypatch):
    """LiteRT's ranges in INT8 are the extremes; test_ranges.py chooses among statistics."""
    monkeypatch.setattr(litert, 'CHOICES', list(litert.CHOICES)[:1])


@pytest.fixture(scope='session')
def swin():
    """It takes RGB."""
    torch.manual_seed(0)
    model = small_swin()
    model.data_preprocessor.to_rgb = True
    return fitted(model)


@pytest.fixture(scope='session')
def exportable(swin):
    """For two images at once."""
    needs('onnx', 'openvino')
    return prepare_export(swin, meta_of(swin), 2)
