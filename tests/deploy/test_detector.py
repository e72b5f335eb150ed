"""The post-processor of detectors beside mmdet's, as one graph and in the parts of a file; no runtime is needed."""
import numpy as np
import pytest
import torch
from mmdet.models.dense_heads import ATSSHead, FCOSHead
from mmdet.models.detectors import MaskRCNN
from mmengine.structures import InstanceData
from torchvision.ops import batched_nms

from mmunorm import fuse_norms
from mmunorm.deploy import ExportedModel
from mmunorm.deploy.formats.pytorch import TorchSession
from mmunorm.deploy.tasks import TASKS
from mmunorm.deploy.tasks.detector import postprocess
from mmunorm.deploy.tasks.detector.graph import coder_of, obstacle, parts_of, pool_of
from mmunorm.deploy.tasks.detector.postprocess import nms_mask
from mmunorm.fusion import allow_partial_calls
from mmunorm.utils import PreflightError

from .conftest import graph_of
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


def propose(graph, maps, sizes):
    """The proposals of a detector for the maps of its neck."""
    scores, deltas = graph.detector.rpn_head(maps)
    features = {f'{kind}{level}': out for kind, outs in dict(score=scores, delta=deltas).items()
                for level, out in enumerate(outs)}
    return postprocess.propose(graph.settings['dense_head'], postprocess.candidates(graph.settings, features, sizes))


@pytest.mark.parametrize('rpn', [dict(), dict(nms_pre=5000, max_per_img=4000), dict(min_bbox_size=12)])
def test_proposals(maps, rpn):
    graph = graph_of(rcnn(rpn=rpn))
    head = graph.detector.rpn_head
    with torch.no_grad():
        boxes, found = propose(graph, maps, torch.tensor(SIZES).float())
        stock = head.predict_by_feat(*head(maps), batch_img_metas=metas())
    for ours, valid, expected in zip(boxes, found, stock, strict=True):
        assert valid.sum() == len(expected) > 20
        assert valid.long().diff().max() <= 0  # the best first
        # Equal scores have no order.
        assert torch.cdist(ours[valid], expected.bboxes, p=torch.inf).min(0).values.max() < 1e-4


@pytest.mark.parametrize('layer', [dict(sampling_ratio=0), dict(sampling_ratio=2), dict(aligned=False)])
def test_pooled_features(maps, layer):
    extractor = rcnn().roi_head.bbox_roi_extractor
    for roi_layer in extractor.roi_layers:
        roi_layer.__dict__.update(layer)
    boxes = boxes_of(60) * 1.3 - 20  # the level changes at 28 pixels
    boxes[:, :4] = torch.tensor([[0, 0, 28., 28.], [5, 5, 33.0001, 33.], [0, 0, 0, 0], [-9, -9, -9, 50]])
    rois = torch.cat([torch.arange(2.)[:, None, None].expand(-1, 60, 1), boxes], -1).flatten(0, 1)
    levels = postprocess.roi_levels(boxes.flatten(0, 1), extractor.finest_scale, 2)
    assert levels.tolist() == extractor.map_roi_levels(rois, 2).tolist() and 10 < levels.sum() < 110
    expected = extractor(tuple(maps[:2]), rois)
    torch.testing.assert_close(postprocess.pool(pool_of(extractor), maps, boxes), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize('rcnn_cfg', [dict(), dict(score_thr=0.4, max_per_img=7)])
def test_detections_and_masks(maps, rcnn_cfg):
    graph = graph_of(rcnn(rcnn_cfg=rcnn_cfg))
    head, run = graph.detector.roi_head, (graph.settings, graph.run, maps)
    with torch.no_grad():
        proposals, found = propose(graph, maps, torch.tensor(SIZES).float())
        found[1, 40:] = False
        dets, labels = postprocess.detect_regions(*run, proposals, found, torch.tensor(SIZES).float())
        masks = postprocess.segment(*run, dets, labels)
        ours = [InstanceData(bboxes=boxes[valid]) for boxes, valid in zip(proposals, found, strict=True)]
        stock = head.predict_bbox(tuple(maps), metas(), ours, head.test_cfg)
        for image, expected in enumerate(stock):
            number = len(expected)
            assert number > 0
            torch.testing.assert_close(dets[image, :number, :4], expected.bboxes, rtol=0, atol=1e-4)
            torch.testing.assert_close(dets[image, :number, 4], expected.scores, rtol=0, atol=1e-5)
            assert labels[image, :number].tolist() == expected.labels.tolist()
            rest = dets[image, number:], labels[image, number:], masks[image, number:]
            assert all((array == 0).all() for array in rest)
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
    meta = dict(task='detector', classes=[], shape=[2, 3, *SHAPE], outputs=graph.outputs, mask_threshold=0.5)
    assert_same_detections(ExportedModel(TorchSession(graph, meta)).test_step(batch(SIZES)), expected)


def changed(detector, path, value):
    """A detector after `detector.PATH = value`."""
    *parents, name = path.split('.')
    part = detector
    for parent in parents:
        part = part[int(parent)] if parent.isdigit() else getattr(part, parent)
    setattr(part, name, value)
    return detector


SOFT_NMS = dict(type='soft_nms', iou_threshold=0.5)


@pytest.mark.parametrize('make, message', [
    (lambda: retinanet(head=dict(loss_cls=dict(type='CrossEntropyLoss'))), 'its dense head scores with a softmax'),
    (lambda: retinanet(nms=SOFT_NMS), "test_cfg.nms is .*soft_nms"),
    (lambda: retinanet(max_per_img=-1), 'test_cfg.max_per_img is -1, and files have a fixed number, such as 100'),
    (lambda: retinanet(nms_pre=-1), 'test_cfg.nms_pre must be a number such as 1000, and is -1'),
    (lambda: retinanet(min_bbox_size=5), 'test_cfg.min_bbox_size is 5, in pixels of the original image'),
    (lambda: changed(retinanet(), 'bbox_head.__class__', ATSSHead), 'its bbox_head is ATSSHead, not RetinaHead'),
    (lambda: changed(retinanet(), 'bbox_head', FCOSHead(3, 8)), 'its bbox_head is FCOSHead, not RetinaHead'),
    (lambda: changed(rcnn(cascade=dict(reg_class_agnostic=True)), 'roi_head.mask_head.1.class_agnostic', True),
     'only some of their masks are class-agnostic'),
    (lambda: changed(rcnn(), 'roi_head.test_cfg.nms', SOFT_NMS), 'test_cfg.rcnn.nms is'),
    (lambda: changed(rcnn(), 'roi_head.test_cfg.max_per_img', -1), 'test_cfg.rcnn.max_per_img is -1, and files have'),
    (lambda: changed(rcnn(), '__class__', type('HybridTaskCascade', (MaskRCNN, ), {})), 'its detector is HybridTask')])
def test_detectors_that_are_refused(make, message):
    with pytest.raises(PreflightError, match=f'cannot be exported whole: .*{message}.*--parts backbone'):
        graph_of(make())
    assert obstacle(rcnn(cascade=dict(reg_class_agnostic=True))) == ''


@pytest.mark.parametrize('options', [
    dict(mask=False), dict(rpn=dict(nms_pre=5000, max_per_img=400)), dict(rcnn_cfg=dict(score_thr=1.)),
    dict(rpn=dict(min_bbox_size=12), rcnn_cfg=dict(score_thr=0.4, max_per_img=7)),
    *({'kind': kind} for kind in ('retinanet', 'cascade_mask_rcnn'))])
def test_in_parts(options):
    """Networks that see channels-last arrays, and of regions those alone that are found."""
    graph = graph_of(KINDS[options['kind']]() if 'kind' in options else rcnn(**options))
    parts, sizes = parts_of(graph, IMAGES), np.float32([*SIZES, (0, 0)])  # no pixels: no objects

    @torch.no_grad()
    def call(name, array):
        part, sample = parts[name]
        return {key: out.numpy() for key, out in part(**dict.fromkeys(sample, torch.from_numpy(array))).items()}

    images = torch.cat([IMAGES, IMAGES[:1]])
    with torch.no_grad():
        expected = graph(images, torch.from_numpy(sizes))
    found = (expected[0][..., 4] > 0).sum(1)
    assert not found[2] and ((found[:2] > 0).all() or options.get('rcnn_cfg', {}).get('score_thr') == 1)
    ours = TASKS['detector'].run(graph.meta, call, images.numpy(), sizes)
    for tolerance, a, b in zip((2e-3, 0, 1e-4), ours, expected, strict=False):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=tolerance)


@pytest.mark.parametrize('clamp', [None, 3])
def test_boxes_of_deltas(clamp):
    coder = rcnn().rpn_head.bbox_coder
    if clamp:
        coder.add_ctr_clamp, coder.ctr_clamp = True, clamp
    boxes, deltas = torch.rand(50, 4).cumsum(-1) * 40, torch.randn(50, 8) * 3
    ours = postprocess.decode(coder_of(coder), boxes[None], deltas[None], torch.tensor([[72., 100.]]))
    torch.testing.assert_close(ours[0], coder.decode(boxes, deltas, max_shape=(72, 100)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('example', [None, lambda model: model.extract_feat(IMAGES),
                                     lambda model: model.test_step(batch(SIZES))])
@torch.no_grad()
def test_a_detector_folded_by_any_call_becomes_a_graph(example):
    model = rcnn()
    expected = graph_of(model).features(IMAGES)
    fuse_norms(model, strict=True, example=example)
    allow_partial_calls(model)
    for name, values in graph_of(model).features(IMAGES).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)
