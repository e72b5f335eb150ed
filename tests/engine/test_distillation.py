"""DistillationHook: the teacher's logits or feature maps join the loss, and nothing else of it stays."""
from types import SimpleNamespace

import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.structures import InstanceData
from mmpretrain.structures import DataSample
from torch.nn import functional as F

from mmunorm.checkpoints.reading import reading
from mmunorm.config.models import build_model
from mmunorm.engine import DistillationHook
from mmunorm.engine.distillation import feature_distance, logit_distance
from mmunorm.utils import PreflightError

from .. import tiny_runs
from ..fusion.models import mmdet_swin


def test_the_distance_of_logits():
    student, teacher = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    p, q = (F.softmax(logits / 2, dim=1) for logits in (teacher, student))
    expected = 4 * (p * (p / q).log()).sum(dim=1).mean()
    torch.testing.assert_close(logit_distance(student, teacher, 2.).double(), expected, rtol=1e-5, atol=0)
    assert logit_distance(teacher, teacher, 2.).abs() < 1e-6


def test_the_distance_of_features():
    teacher = (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 2, 2) * 10 + 5)
    assert feature_distance(teacher, teacher) == 0
    means = tuple(torch.full_like(value, value.mean().item()) for value in teacher)
    torch.testing.assert_close(feature_distance(means, teacher), torch.tensor(1.))


@pytest.mark.parametrize('arguments, match', [
    (dict(temperature=0), 'temperature must be a positive number, got 0'),
    (dict(weight=1.5), 'weight must be from 0 to 1, got 1.5'),
])
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        DistillationHook('a.pth', **arguments)


def begin(hook, cfg, model):
    hook.before_train(SimpleNamespace(cfg=cfg, model=model))


def ln_model(cfg, path):
    cfg.model.backbone.norm_cfg = dict(type='LN')
    tiny_runs.save_weights(cfg, path, ('dark', 'light'))
    teacher = build_model(cfg).eval()
    teacher.load_state_dict(torch.load(path, weights_only=False)['state_dict'])
    cfg.model.backbone.norm_cfg = dict(type='UN', warmup_iters=1)
    return teacher


def losses_of(model, data, hook, cfg):
    """The losses without and with the hook."""
    torch.manual_seed(1)
    plain = model(**data, mode='loss')
    begin(hook, cfg, model)
    torch.manual_seed(1)
    return plain, model(**data, mode='loss')


def test_a_classifier(tmp_path):
    cfg = Config.fromfile(tiny_runs.write_classifier(tmp_path))
    teacher = ln_model(cfg, tmp_path / 'ln.pth')
    model = build_model(cfg)
    names, text = model.state_dict().keys(), cfg.pretty_text
    data = dict(inputs=torch.randn(4, 3, 32, 32), data_samples=[DataSample().set_gt_label(i % 2) for i in range(4)])
    hook = DistillationHook(str(tmp_path / 'ln.pth'), temperature=3., weight=0.25)
    state = torch.random.get_rng_state()
    plain, both = losses_of(model, data, hook, cfg)
    torch.testing.assert_close(both['loss'], 0.75 * plain['loss'])
    with torch.no_grad():
        distance = logit_distance(model(data['inputs'], mode='tensor'), teacher(data['inputs'], mode='tensor'), 3.)
    torch.testing.assert_close(both['loss_distillation'], 0.25 * distance)
    both['loss_distillation'].backward()
    assert model.backbone.norm1.weight.grad.abs().sum() > 0
    assert model.state_dict().keys() == names and cfg.pretty_text == text
    assert not any(p.requires_grad for p in hook._teacher.parameters())

    hook.after_train(None)
    assert 'loss_distillation' not in model(**data, mode='loss')
    torch.random.set_rng_state(state)
    first = torch.rand(1)
    torch.random.set_rng_state(state)
    begin(hook, cfg, model)
    assert torch.equal(torch.rand(1), first)  # no random number of the run is used


def test_a_detector(tmp_path):
    cfg = Config(dict(default_scope='mmdet', model=dict(
        type='RetinaNet', backbone=mmdet_swin(),
        neck=dict(type='FPN', in_channels=[8, 16], out_channels=8, num_outs=5),
        bbox_head=dict(type='RetinaHead', num_classes=3, in_channels=8, feat_channels=8, stacked_convs=1),
        train_cfg=dict(assigner=dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0),
                       sampler=dict(type='PseudoSampler'), allowed_border=-1, pos_weight=-1))))
    teacher = ln_model(cfg, tmp_path / 'ln.pth')
    model = build_model(cfg).eval()
    sample = DetDataSample(metainfo=dict(img_shape=(64, 64), pad_shape=(64, 64)))
    sample.gt_instances = InstanceData(bboxes=torch.tensor([[4., 4, 40, 40]]), labels=torch.tensor([1]))
    data = dict(inputs=torch.randn(1, 3, 64, 64), data_samples=[sample])
    hook = DistillationHook(str(tmp_path / 'ln.pth'), weight=0.5)
    plain, both = losses_of(model, data, hook, cfg)
    assert set(both) == {*plain, 'loss_distillation'}
    for name, value in plain.items():  # lists of tensors, one a level
        torch.testing.assert_close(both[name], [loss / 2 for loss in value])
    expected = feature_distance(model.backbone(data['inputs']), teacher.backbone(data['inputs']))
    torch.testing.assert_close(both['loss_distillation'], expected / 2)


def test_errors(classifier):
    config, checkpoint, _ = classifier
    cfg = Config.fromfile(config)
    model = build_model(cfg)
    for path, settings, student, message in (
            ('gone.pth', cfg, model, 'there is no checkpoint gone.pth'),
            (str(checkpoint), cfg, model, "its norms are not the config's"),
            ('a.pth', Config(), model, 'the model has no backbone with norms'),
            ('a.pth', cfg, torch.nn.Linear(1, 1), 'Linear has no backbone to compare')):
        with reading(trusted=True), pytest.raises(PreflightError, match=message):
            begin(DistillationHook(path), settings, student)
