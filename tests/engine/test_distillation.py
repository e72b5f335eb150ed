"""DistillationHook: the teacher's logits or feature maps join the loss, and nothing else of it stays."""
import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.structures import InstanceData
from mmpretrain.structures import DataSample
from torch.nn import functional as F

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


class Runner:
    """As much of a runner as the hook asks for."""

    def __init__(self, cfg, model):
        self.cfg, self.model = cfg, model


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
    hook.before_train(Runner(cfg, model))
    torch.manual_seed(1)
    both = model(**data, mode='loss')
    return plain, both


def test_a_classifier(tmp_path):
    config = tiny_runs.write_classifier(tmp_path)
    cfg = Config.fromfile(config)
    cfg.data_preprocessor = dict(cfg.data_preprocessor)
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

    hook.after_train(Runner(cfg, model))
    assert 'loss_distillation' not in model(**data, mode='loss')
    torch.random.set_rng_state(state)
    first = torch.rand(1)
    torch.random.set_rng_state(state)
    hook.before_train(Runner(cfg, model))
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
        torch.testing.assert_close(both[name], [each / 2 for each in value])
    expected = feature_distance(model.backbone(data['inputs']), teacher.backbone(data['inputs']))
    torch.testing.assert_close(both['loss_distillation'], expected / 2)


def test_what_is_refused(tmp_path):
    cfg = Config.fromfile(tiny_runs.write_classifier(tmp_path))
    model = build_model(cfg)
    with pytest.raises(PreflightError, match='there is no checkpoint gone.pth'):
        DistillationHook('gone.pth').before_train(Runner(cfg, model))
    tiny_runs.save_weights(cfg, tmp_path / 'un.pth', ('dark', 'light'))
    with pytest.raises(PreflightError, match='does not fit the config'):
        DistillationHook(str(tmp_path / 'un.pth')).before_train(Runner(cfg, model))
    with pytest.raises(PreflightError, match='the model has no backbone, whose norms'):
        DistillationHook('a.pth').before_train(Runner(Config(), model))
    with pytest.raises(PreflightError, match='Linear has no backbone to compare'):
        DistillationHook('a.pth').before_train(Runner(cfg, torch.nn.Linear(1, 1)))
