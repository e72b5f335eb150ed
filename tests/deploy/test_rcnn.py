"""Rewritten parts of mmdet beside the stock code, and the parts of a chip beside the whole; no runtime is needed."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.models.dense_heads import ATSSHead, FCOSHead
from mmengine.structures import InstanceData
from torchvision.ops import batched_nms, nms

from mmunorm import fuse_norms
from mmunorm.deploy import ExportedModel
from mmunorm.deploy.formats.pytorch import TorchSession
from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.rcnn import detector as rewritten
from mmunorm.deploy.rcnn import host
from mmunorm.deploy.rcnn.detector import nms_mask, obstacle
from mmunorm.deploy.rcnn.parts import coder_of, parts_of, pool_of, settings_of
from mmunorm.utils import PreflightError

from ..versions import needs_open_export
from .detectors import KINDS, assert_same_detections, batch, rcnn, retinanet

SHAPE = (72, 100)  # 18 x 25 and 9 x 13 tokens, which windows of 4 pad
SIZES = [(72, 100), (61, 83)]
IMAGES = torch.rand(2, 3, *SHAPE, generator=torch.Generator().manual_seed(1)) * 255


def boxes_of(number, sets=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(sets, number, 2, generator=generator) * 60
    return torch.cat([corner, corner + torch.rand(sets, number, 2, generator=generator) * 40], -1)


def metas():
    return [dict(img_shape=size, ori_shape=size, scale_factor=(1., 1.)) for size in SIZES]


@pytest.fixture(scope='module')
def maps():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 8, 18 // s, 25 // s, generator=generator) for s in (1, 2, 4)]


@pytest.mark.parametrize('number', [5, 100])
def test_the_host_takes_ties_in_the_order_given(number):
    """As torch does; numpy's usual sort does not."""
    scores = np.random.default_rng(0).integers(0, 3, number).astype(np.float32) / 2
    expected = sorted(np.flatnonzero(scores), key=lambda i: -scores[i])
    assert host.largest(scores, number).tolist() == expected
    assert host.largest(scores, number // 2).tolist() == expected[:number // 2]
    boxes, valid = boxes_of(number)[0], np.flatnonzero(scores)
    kept = valid[nms(boxes[valid], torch.from_numpy(scores[valid]), 0.2).numpy()]
    assert host.nms(boxes.numpy(), scores, 0.2).tolist() == kept.tolist()


def test_nms_mask():
    boxes, scores = boxes_of(80, 3), torch.rand(3, 80).sub(0.3).relu()
    kept = nms_mask(boxes, scores, 0.4)
    index = torch.arange(3)[:, None].expand(-1, 80)
    valid = scores.flatten() > 0
    places = valid.nonzero()[:, 0]
    stock = places[batched_nms(boxes.flatten(0, 1)[valid], scores.flatten()[valid], index.flatten()[valid], 0.4)]
    assert sorted(kept.flatten().nonzero()[:, 0].tolist()) == sorted(stock.tolist())
    assert kept.unique().tolist() == [0, 1] and kept.sum() < valid.sum()
    assert nms_mask(boxes, 0 * scores, 0.4).sum() == 0


@pytest.mark.parametrize('rpn', [dict(), dict(nms_pre=5000, max_per_img=4000), dict(min_bbox_size=12)])
def test_proposals(maps, rpn):
    head = rcnn(rpn=rpn).rpn_head
    with torch.no_grad():
        boxes, found = rewritten.propose(head, maps, torch.tensor(SIZES).float())
        stock = head.predict_by_feat(*head(maps), batch_img_metas=metas())
    for own, valid, expected in zip(boxes, found, stock, strict=True):
        assert valid.sum() == len(expected) > 20
        assert valid.long().diff().max() <= 0  # the best first
        # Equal scores have no order.
        assert torch.cdist(own[valid], expected.bboxes, p=torch.inf).min(0).values.max() < 1e-4


@pytest.mark.slow
@needs_open_export
def test_proposals_of_maps_of_any_size():
    """Exported with open shapes; some levels have fewer boxes than the top-k takes."""
    class Proposals(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = rcnn().rpn_head

        def forward(self, a, b, c, sizes):
            return rewritten.propose(self.head, (a, b, c), sizes)

    def inputs(height, width):
        maps = [torch.randn(2, 8, height * s, width * s) for s in (4, 2, 1)]
        return *maps, torch.tensor([[height * 16., width * 16.], [height * 14., width * 15.]])

    height, width = torch.export.Dim('height'), torch.export.Dim('width')
    model = Proposals().eval()
    program = torch.export.export(
        model, inputs(4, 7), strict=False, prefer_deferred_runtime_asserts_over_guards=True,
        dynamic_shapes=(*({2: s * height, 3: s * width} for s in (4, 2, 1)), None)).module()
    for size in ((4, 7), (5, 3)):
        given = inputs(*size)
        with torch.no_grad():
            own, found = program(*given)
            expected, expected_found = model(*given)
        assert own.shape == (2, 60, 4) and found.sum() == expected_found.sum() > 40
        for boxes, valid, all_expected, is_expected in zip(own, found, expected, expected_found, strict=True):
            distance = torch.cdist(boxes[valid], all_expected[is_expected], p=torch.inf)
            assert distance.min(0).values.max() < 1e-4


@pytest.mark.parametrize('layer', [dict(sampling_ratio=0), dict(sampling_ratio=2), dict(aligned=False)])
def test_pooled_features(maps, layer):
    extractor = rcnn().roi_head.bbox_roi_extractor
    for each in extractor.roi_layers:
        each.__dict__.update(layer)
    boxes = boxes_of(60) * 1.3 - 20  # the level changes at 28 pixels
    boxes[:, :4] = torch.tensor([[0, 0, 28., 28.], [5, 5, 33.0001, 33.], [0, 0, 0, 0], [-9, -9, -9, 50]])
    rois = torch.cat([torch.arange(2.)[:, None, None].expand(-1, 60, 1), boxes], -1).flatten(0, 1)
    levels = rewritten.roi_levels(extractor, boxes.flatten(0, 1), 2)
    assert levels.tolist() == extractor.map_roi_levels(rois, 2).tolist() and 10 < levels.sum() < 110
    expected = extractor(tuple(maps[:2]), rois)
    torch.testing.assert_close(rewritten.pool(extractor, tuple(maps), boxes), expected, rtol=0, atol=1e-5)
    for image in range(2):
        own = host.pool([each[image].permute(1, 2, 0).numpy() for each in maps[:2]], boxes[image].numpy(),
                        pool_of(extractor))
        stock = expected.unflatten(0, (2, 60))[image].permute(0, 2, 3, 1)
        np.testing.assert_allclose(own, stock.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize('rcnn_cfg', [dict(), dict(score_thr=0.4, max_per_img=7)])
def test_detections_and_masks(maps, rcnn_cfg):
    model = rcnn(rcnn_cfg=rcnn_cfg)
    head = model.roi_head
    with torch.no_grad():
        proposals, found = rewritten.propose(model.rpn_head, maps, torch.tensor(SIZES).float())
        found[1, 40:] = False
        dets, labels = rewritten.detect(head, maps, proposals, found, torch.tensor(SIZES).float())
        masks = rewritten.segment(head, maps, dets, labels)
        own = [InstanceData(bboxes=boxes[valid]) for boxes, valid in zip(proposals, found, strict=True)]
        stock = head.predict_bbox(tuple(maps), metas(), own, head.test_cfg)
        for image, expected in enumerate(stock):
            number = len(expected)
            assert number > 0
            torch.testing.assert_close(dets[image, :number, :4], expected.bboxes, rtol=0, atol=1e-4)
            torch.testing.assert_close(dets[image, :number, 4], expected.scores, rtol=0, atol=1e-5)
            assert labels[image, :number].tolist() == expected.labels.tolist()
            rest = dets[image, number:], labels[image, number:], masks[image, number:]
            assert all((each == 0).all() for each in rest)
            rois = torch.cat([torch.full((number, 1), float(image)), expected.bboxes], 1)
            logits = head._mask_forward(tuple(maps), rois)['mask_preds']
            probability = logits[range(number), expected.labels].sigmoid()
            torch.testing.assert_close(masks[image, :number], probability, rtol=0, atol=1e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_whole_detector(kind):
    """From pixels to detections, with a smaller image in the batch that mmdet pads."""
    model = KINDS[kind]()
    model.data_preprocessor.pad_size_divisor = 4
    expected = model.test_step(batch(SIZES))
    fuse_norms(model, strict=True)
    graph = graph_of(model)
    meta = dict(task='detector', classes=[], shape=[2, 3, *SHAPE], divisor=4, outputs=graph.outputs, mask_threshold=0.5)
    assert_same_detections(ExportedModel(TorchSession(graph, meta)).test_step(batch(SIZES)), expected)


@pytest.mark.parametrize('change, said', [
    (dict(head=dict(loss_cls=dict(type='CrossEntropyLoss'))), 'its bbox_head scores with a softmax'),
    (dict(nms=dict(type='soft_nms', iou_threshold=0.5)), "test_cfg.nms is .*soft_nms"),
    (dict(max_per_img=-1), 'test_cfg.max_per_img is -1, and files have a fixed number, such as 100'),
    (dict(nms_pre=-1), 'test_cfg.nms_pre must be a number such as 1000, and is -1'),
    (dict(min_bbox_size=5), 'test_cfg.min_bbox_size is 5, in pixels of the original image')])
def test_single_stage_detectors_that_are_refused(change, said):
    with pytest.raises(PreflightError, match=f'RetinaNet cannot be exported whole: .*{said}.*--parts backbone'):
        graph_of(retinanet(**change))
    detector = retinanet()
    detector.bbox_head.__class__ = ATSSHead
    assert obstacle(detector) == 'its bbox_head is ATSSHead, whose forward is not that of AnchorHead'
    detector.bbox_head = FCOSHead(3, 8)
    assert obstacle(detector) == 'its bbox_head is FCOSHead, not one such as RetinaHead'


def test_two_stage_detectors_that_are_refused():
    detector = rcnn(cascade=dict(reg_class_agnostic=True))
    assert obstacle(detector) == ''
    detector.roi_head.mask_head[1].class_agnostic = True
    assert 'only some of their masks are class-agnostic' in obstacle(detector)
    detector = rcnn()
    detector.roi_head.test_cfg.nms = dict(type='soft_nms', iou_threshold=0.5)
    assert 'test_cfg.rcnn.nms is' in obstacle(detector)
    detector = rcnn()
    detector.roi_head.test_cfg.max_per_img = -1
    assert obstacle(detector).startswith('test_cfg.rcnn.max_per_img is -1, and files have a fixed number')
    detector.__class__ = type('HybridTaskCascade', (type(detector), ), {})
    assert 'its detector is HybridTaskCascade, not ' in obstacle(detector)


# ---------------------------------------------------------------- in parts, with numpy between them

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
    dict(rpn=dict(min_bbox_size=12), rcnn_cfg=dict(score_thr=0.4, max_per_img=7)),
    *({'kind': kind} for kind in KINDS if kind.startswith(('retina', 'cascade')))])
def test_it_is_the_graph(options):
    model = KINDS[options['kind']]() if 'kind' in options else rcnn(**options)
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


def test_a_image_without_pixels_has_no_objects():
    _, parts = in_parts(rcnn())
    assert all((each == 0).all() for each in parts(IMAGES[:1].numpy(), np.zeros((1, 2), np.float32)))


def test_a_coder_that_clamps_centers():
    coder = rcnn().rpn_head.bbox_coder
    coder.add_ctr_clamp, coder.ctr_clamp = True, 3
    boxes, deltas = torch.rand(1, 50, 4).cumsum(-1) * 40, torch.randn(1, 50, 8) * 3
    own = host.decode(boxes[0].numpy(), deltas[0].reshape(50, 2, 4).numpy(), np.float32([72, 100]), coder_of(coder))
    expected = rewritten.decode(coder, boxes, deltas, torch.tensor([[72., 100.]]))
    np.testing.assert_allclose(own.reshape(50, 8), expected[0], rtol=1e-5, atol=1e-4)


def test_the_host_needs_numpy_alone():
    code = f"""
import runpy, sys
Host = runpy.run_path({str(Path(host.__file__))!r})['Host']
assert not {{'torch', 'mmunorm', 'mmdet'}} & set(sys.modules)
"""
    subprocess.run([sys.executable, '-c', code], check=True)
