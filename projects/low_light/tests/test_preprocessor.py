import copy

import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.registry import MODELS
from mmpretrain.structures import DataSample
from torch import nn

from mmunorm import fuse_norms
from mmunorm.checkpoints.folded import folded_config, folding_of
from mmunorm.norms import Norm
from projects.low_light.low_light import IAT, EnhancingPreprocessor, ImageEnhancer
from tests.deploy.conftest import graph_of
from tests.deploy.detectors import rcnn

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


class Spy(nn.Module):
    """An enhancer that changes nothing, and records its inputs."""

    def forward(self, x, sizes=None):
        self.received, self.sizes = x, sizes
        return x


def classifier_cfg(**settings):
    return dict(
        type='EnhancedModel', task_model='mmpretrain.ImageClassifier', enhancer=dict(type='IAT'),
        data_preprocessor=dict(type='mmpretrain.ClsDataPreprocessor', mean=MEAN, std=STD, to_rgb=True),
        backbone=dict(type='UNSwinTransformer', arch=dict(embed_dims=12, depths=[1], num_heads=[1]), img_size=32,
                      window_size=4, out_indices=(0, ), norm_cfg=dict(type='UN')),
        neck=dict(type='mmpretrain.GlobalAveragePooling'),
        head=dict(type='mmpretrain.LinearClsHead', num_classes=2, in_channels=12), **settings)


def spread(model):
    """Adds noise to the initial weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return model


def classifier(**settings):
    return spread(MODELS.build(classifier_cfg(**settings)))


def batch(*sizes):
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    return dict(inputs=images, data_samples=[DataSample().set_gt_label(1) for _ in sizes])


def det_batch(*sizes):
    return dict(batch(*sizes), data_samples=[
        DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1., 1.))) for size in sizes])


def with_and_without(cfg, takes_rgb, *sizes):
    """A batch, the data preprocessor's results without and with a spy as enhancer, and the spy."""
    plain, spy = MODELS.build(cfg), Spy()
    enhancing = EnhancingPreprocessor(MODELS.build(cfg), spy, frozen=False, takes_rgb=takes_rgb)
    assert enhancing.pad_size_divisor == plain.pad_size_divisor  # it has the attributes of the inner one
    data = (det_batch if 'Det' in cfg['type'] else batch)(*sizes)
    return data, plain(copy.deepcopy(data)), enhancing(copy.deepcopy(data)), spy


PREPROCESSORS = [
    (dict(type='mmdet.DetDataPreprocessor', mean=MEAN, std=STD, bgr_to_rgb=True, pad_size_divisor=32), False),
    (dict(type='mmdet.DetDataPreprocessor', mean=[103., 116., 123.], std=[1., 1., 1.]), False),
    (dict(type='mmdet.DetDataPreprocessor', mean=MEAN, std=STD), True),
    (dict(type='mmpretrain.ClsDataPreprocessor', mean=MEAN, std=STD, to_rgb=True), False),
    (dict(type='mmpretrain.ClsDataPreprocessor'), True),
]


@pytest.mark.parametrize('cfg, takes_rgb', PREPROCESSORS)
def test_the_enhancer_gets_rgb_in_0_to_1_and_the_model_what_it_got_without_one(cfg, takes_rgb):
    data, expected, found, spy = with_and_without(cfg, takes_rgb, (24, 32), (24, 32))
    rgb = torch.stack(data['inputs'] if takes_rgb else [image.flip(0) for image in data['inputs']])
    torch.testing.assert_close(spy.received, rgb / 255.)
    torch.testing.assert_close(found['inputs'], expected['inputs'], atol=1e-4, rtol=1e-5)
    if 'Det' in cfg['type']:
        assert found['data_samples'][0].batch_input_shape == expected['data_samples'][0].batch_input_shape


def test_no_padding_is_enhanced():
    _, expected, found, spy = with_and_without(*PREPROCESSORS[0], (24, 32), (30, 20))
    assert spy.sizes.tolist() == [[24, 32], [30, 20]]
    torch.testing.assert_close(found['inputs'], expected['inputs'], atol=1e-4, rtol=1e-5)
    assert (found['inputs'][1, :, 30:] == 0).all()


def test_wrong_images_are_one_line():
    preprocessor = classifier().data_preprocessor
    with pytest.raises(TypeError, match=r'must be images \(3, h, w\), got \[\(1, 8, 8\)\]'):
        preprocessor(dict(inputs=[torch.zeros(1, 8, 8)]))
    with pytest.raises(TypeError, match='must be images'):
        preprocessor(dict(inputs=dict(weak=[torch.zeros(3, 8, 8)])))


def test_jointly_the_loss_of_the_task_trains_both():
    model = classifier()
    model.forward(**model.data_preprocessor(batch((32, 32), (32, 32)), True), mode='loss')['loss'].backward()
    enhancer = model.data_preprocessor.enhancer
    assert enhancer.training
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in enhancer.named_parameters()
               if not name.endswith('attn.queries'))
    assert model.backbone.patch_embed.projection.weight.grad.abs().sum() > 0


def test_a_frozen_enhancer_does_not_change():
    model = classifier(freeze_enhancer=True).train()
    enhancer = model.data_preprocessor.enhancer
    before = copy.deepcopy(enhancer.state_dict())
    assert model.training and not any(module.training for module in enhancer.modules())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    data = model.data_preprocessor(batch((32, 32)), True)
    assert not data['inputs'].requires_grad
    model.forward(**data, mode='loss')['loss'].backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in enhancer.parameters())
    assert all(torch.equal(value, before[name]) for name, value in enhancer.state_dict().items())


def test_the_class_and_the_names_of_parameters_are_the_models_own():
    cfg = classifier_cfg()
    model = MODELS.build(cfg)
    del cfg['enhancer']
    cfg['type'] = cfg.pop('task_model')
    stock = MODELS.build(cfg)
    assert type(model) is type(stock)
    extra = {name for name in model.state_dict() if name not in stock.state_dict()}
    assert set(stock.state_dict()) <= set(model.state_dict())
    assert all(name.startswith('data_preprocessor.enhancer.') for name in extra)


def test_it_starts_from_the_checkpoint_of_an_image_enhancer(tmp_path):
    trained = spread(ImageEnhancer(dict(type='IAT')))
    torch.save(dict(state_dict=trained.state_dict()), tmp_path / 'a.pth')
    cfg = classifier_cfg()
    cfg['enhancer']['init_cfg'] = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'), prefix='backbone.')
    model = MODELS.build(cfg)
    model.init_weights()
    state = model.data_preprocessor.enhancer.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in trained.backbone.state_dict().items())


def test_it_folds_with_the_model_and_its_checkpoint_builds_it_again():
    model = classifier().eval()
    data = batch((32, 32))
    expected = model.test_step(copy.deepcopy(data))[0].pred_score
    fuse_norms(model, strict=True)
    assert not any(isinstance(module, Norm) for module in model.modules())
    torch.testing.assert_close(model.test_step(copy.deepcopy(data))[0].pred_score, expected, atol=1e-5, rtol=1e-4)
    again = MODELS.build(folded_config(classifier_cfg(), folding_of(model))).eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.test_step(data)[0].pred_score, expected, atol=1e-5, rtol=1e-4)


def test_a_mask_rcnn_folded_and_as_a_graph():
    model = rcnn()
    model.data_preprocessor = EnhancingPreprocessor(model.data_preprocessor, spread(IAT()), frozen=False,
                                                    takes_rgb=False)
    model.eval()
    sizes = (72, 100), (61, 83)
    data = det_batch(*sizes)

    def found():
        return [sample.pred_instances for sample in model.test_step(copy.deepcopy(data))]

    expected = found()
    assert all(len(instances) > 3 for instances in expected)
    fuse_norms(model, strict=True)
    images = torch.stack([nn.functional.pad(image.float(), (0, 100 - w, 0, 72 - h), value=77.)
                          for image, (h, w) in zip(data['inputs'], sizes, strict=True)])
    dets, labels, _ = graph_of(model)(images, torch.tensor(sizes).float())
    for i, (before, folded) in enumerate(zip(expected, found(), strict=True)):
        assert torch.equal(folded.labels, before.labels) and torch.equal(labels[i][:len(before)], before.labels)
        torch.testing.assert_close(folded.bboxes, before.bboxes, atol=1e-2, rtol=1e-3)
        torch.testing.assert_close(folded.scores, before.scores, atol=1e-4, rtol=1e-3)
        assert (folded.masks == before.masks).float().mean() > 0.999
        torch.testing.assert_close(dets[i][:len(before), :4], before.bboxes, atol=1e-2, rtol=1e-3)


def test_test_time_augmentation_enhances_each_image():
    cfg = classifier_cfg()
    model = MODELS.build(dict(type='mmpretrain.AverageClsScoreTTA', module=cfg)).eval()
    spread(model.module)
    data = batch((32, 32))
    alone, = model.module.test_step(copy.deepcopy(data))
    # A batch of test-time augmentation: for each image a list of inputs and samples.
    twice = {key: [copy.deepcopy(value), copy.deepcopy(value)] for key, value in data.items()}
    together, = model.test_step(twice)
    torch.testing.assert_close(together.pred_score, alone.pred_score)
