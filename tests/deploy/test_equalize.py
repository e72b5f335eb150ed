import shutil

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip('ai_edge_litert')
pytest.importorskip('litert_torch')

from mmunorm import compare, export
from mmunorm.deploy import prepare_export
from mmunorm.deploy.equalize import POWER, _Graph, _largest, equalize
from mmunorm.deploy.formats.base import silent
from mmunorm.deploy.formats.litert import NAME, LiteRtSession, programs_of, write_float
from mmunorm.deploy.tflite import changed
from mmunorm.deploy.torch_models import as_exportable

from ..fusion import models
from .conftest import SHAPE, blurred, meta_of, normalizing


@pytest.fixture(scope='module')
def images():
    """`(2, H, W, 3)`: windows and patch merging pad."""
    return blurred(2).float().permute(0, 2, 3, 1).numpy()


def written(exportable, path):
    with silent():
        write_float(programs_of(exportable), path, exportable.meta)
    return path


def streams_of(path, images):
    """The streams of a file, and the largest values of their channels."""
    with changed(path) as file:
        streams = _Graph(file, file.subgraphs[0]).streams()
    return streams, _largest(path, NAME, 0, {NAME: [dict(images=images)]}, streams)


def test_the_same_function_with_more_even_streams(exportable, images, tmp_path):
    path = written(exportable, tmp_path / 'm.tflite')
    before = LiteRtSession(path).call(NAME, images)['logits']
    with changed(path) as file:  # exact by itself, and channels become more unequal
        rng = np.random.default_rng(0)
        for stream in _Graph(file, file.subgraphs[0]).streams():
            stream.scale(np.exp(rng.normal(0, 1, stream.channels)))
    _, uneven = streams_of(path, images)
    assert equalize(path, {NAME: [dict(images=images)]}) == 4
    streams, even = streams_of(path, images)
    # Normalized pixels, a stage, the patches before a merging, a stage.
    assert [stream.channels for stream in streams] == [3, 8, 32, 16]
    for old, new in zip(uneven, even, strict=True):
        assert np.log(old).std() > 0.3
        np.testing.assert_allclose(np.log(new).std(), (1 - POWER) * np.log(old).std(), rtol=0.01)
    after = LiteRtSession(path).call(NAME, images)['logits']
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())


def test_nothing_is_moved_past_layer_norm(images, tmp_path):
    model = normalizing(models.swin_classifier(
        arch=dict(embed_dims=8, depths=[1, 1], num_heads=[2, 4]), norm_cfg=dict(type='LN')))
    path = written(prepare_export(model, meta_of(model, SHAPE), 2), tmp_path / 'm.tflite')
    streams, _ = streams_of(path, images)
    assert [stream.channels for stream in streams] == [3]  # normalized pixels, which the first convolution reads


def test_channels_that_no_image_has_are_not_blown_up(exportable, images, tmp_path):
    """Of grey images the normalized pixels are 0; where others differ from it, the function is the same."""
    path = written(exportable, tmp_path / 'm.tflite')
    before, (_, old) = LiteRtSession(path).call(NAME, images)['logits'], streams_of(path, images)
    for lively, least, most in ((0, 1, 1), (1, 100, 1e3**POWER)):  # a dead stream, and two dead channels
        changed_path = shutil.copy(path, tmp_path / f'{lively}.tflite')
        grey = np.full_like(images, 120)
        grey[..., :lively] = images[..., :lively]
        equalize(changed_path, {NAME: [dict(images=grey)]})
        factors = old[0] / streams_of(changed_path, images)[1][0]
        assert 0.99 * least < factors.max() / factors.min() < 1.01 * most
        after = LiteRtSession(changed_path).call(NAME, images)['logits']
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())


@pytest.mark.slow
def test_a_grouped_convolution_reads_the_stream(tmp_path):
    """Each of its outputs reads the channels of its group."""
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 12, 4, 4), nn.Conv2d(12, 5, 4)
            self.inner = nn.Conv2d(12, 12, 3, padding=1, groups=3)
            self.first.weight.data *= torch.logspace(-1, 1, 12).view(-1, 1, 1, 1)

        def forward(self, x):
            x = self.first(x)
            return self.last(x + self.inner(x)).flatten(1)

    torch.manual_seed(0)
    model, x = Grouped().eval(), torch.randn(2, 3, 16, 16)
    exportable, path = as_exportable(model, x), tmp_path / 'm.tflite'
    with silent():
        write_float(programs_of(exportable), path, exportable.meta)
        data = {NAME: [dict(images=x.permute(0, 2, 3, 1).numpy())]}
        before = LiteRtSession(path, meta=exportable.meta).run([x.numpy()])[0]
        assert equalize(path, data) == 1
        after = LiteRtSession(path, meta=exportable.meta).run([x.numpy()])[0]
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-4 * np.abs(before).max())
    export(model, x, path, 'full', x)
    assert compare(path, model, x).snr['output'] > 20
