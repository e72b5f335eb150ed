"""A detector cut into parts, its boxes in numpy, beside the graph in one piece; no runtime is needed."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.rcnn import detector as in_torch
from mmunorm.deploy.rcnn import host
from mmunorm.deploy.rcnn.parts import coder_of, parts_of, pool_of, settings_of

from .detectors import rcnn
from .test_rcnn import SHAPE, SIZES

IMAGES = torch.rand(2, 3, *SHAPE, generator=torch.Generator().manual_seed(1)) * 255


def in_parts(model):
    """The detector as a :class:`Host` whose parts are torch's."""
    graph = graph_of(model)
    parts = parts_of(graph, IMAGES.permute(0, 2, 3, 1))

    @torch.no_grad()
    def run(name, array):
        return {key: out.numpy() for key, out in parts[name][0](torch.from_numpy(array)).items()}

    return graph, host.Host(settings_of(graph), run)


@pytest.mark.parametrize('options', [
    dict(), dict(mask=False), dict(rpn=dict(nms_pre=5000, max_per_img=400)), dict(rcnn_cfg=dict(score_thr=1.)),
    dict(rpn=dict(min_bbox_size=12), rcnn_cfg=dict(score_thr=0.4, max_per_img=7))])
def test_it_is_the_graph(options):
    model = rcnn(**options)
    fuse_norms(model, strict=True)
    graph, parts = in_parts(model)
    with torch.no_grad():
        expected = graph(IMAGES, torch.tensor(SIZES).float())
    own = parts(IMAGES.numpy(), np.float32(SIZES))
    found = (expected[0][..., 4] > 0).sum(1)
    assert (found > 0).all() or options.get('rcnn_cfg', {}).get('score_thr') == 1
    for tolerance, a, b in zip((2e-3, 0, 1e-4), own, expected, strict=False):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=tolerance)


def test_a_picture_without_pixels_has_no_objects():
    _, parts = in_parts(rcnn())
    assert all((each == 0).all() for each in parts(IMAGES[:1].numpy(), np.zeros((1, 2), np.float32)))


@pytest.mark.parametrize('layer', [dict(sampling_ratio=0), dict(sampling_ratio=2), dict(aligned=False)])
def test_pooled_features(layer):
    extractor = rcnn().roi_head.bbox_roi_extractor
    for each in extractor.roi_layers:
        each.__dict__.update(layer)
    generator = torch.Generator().manual_seed(3)
    maps = [torch.randn(1, 8, 18 // s, 25 // s, generator=generator) for s in (1, 2)]
    corner = torch.rand(60, 2, generator=generator) * 120 - 20
    boxes = torch.cat([corner, corner + torch.rand(60, 2, generator=generator) * 50], 1)
    boxes[:4] = torch.tensor([[0, 0, 28., 28.], [5, 5, 33.0001, 33.], [0, 0, 0, 0], [-9, -9, -9, 50]])
    own = host.pool([each[0].permute(1, 2, 0).numpy() for each in maps], boxes.numpy(), pool_of(extractor))
    expected = in_torch.pool(extractor, tuple(maps), boxes[None]).permute(0, 2, 3, 1)
    np.testing.assert_allclose(own, expected.numpy(), rtol=0, atol=1e-5)


def test_a_coder_that_clamps_centers():
    coder = rcnn().rpn_head.bbox_coder
    coder.add_ctr_clamp, coder.ctr_clamp = True, 3
    boxes, deltas = torch.rand(1, 50, 4).cumsum(-1) * 40, torch.randn(1, 50, 8) * 3
    own = host.decode(boxes[0].numpy(), deltas[0].reshape(50, 2, 4).numpy(), np.float32([72, 100]), coder_of(coder))
    expected = in_torch.decode(coder, boxes, deltas, torch.tensor([[72., 100.]]))
    np.testing.assert_allclose(own.reshape(50, 8), expected[0], rtol=1e-5, atol=1e-4)


def test_the_host_needs_numpy_alone():
    code = f"""
import runpy, sys
Host = runpy.run_path({str(Path(host.__file__))!r})['Host']
assert not {{'torch', 'mmunorm', 'mmdet'}} & set(sys.modules)
"""
    subprocess.run([sys.executable, '-c', code], check=True)
