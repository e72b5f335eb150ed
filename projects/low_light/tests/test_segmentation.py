"""An enhancer before a segmentor of mmsegmentation, which `make install` does not install."""
import copy

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS
from mmengine.structures import PixelData

from mmunorm import fuse_norms
from mmunorm.config.models import build_model
from projects.low_light.low_light import EnhancingPreprocessor
from tests import tiny_runs

from .test_preprocessor import MEAN, STD, Spy, spread

pytest.importorskip('mmseg')
from mmseg.structures import SegDataSample

CROP = 64, 96


def small_config():
    """The config of ACDC with a narrow network and small crops."""
    cfg = Config.fromfile(tiny_runs.ROOT / 'projects/low_light/configs/acdc/swin_t_un_upernet_acdc.py')
    cfg.model.enhancer.init_cfg = cfg.model.backbone.init_cfg = None
    cfg.model.data_preprocessor.size = CROP
    cfg.model.backbone.arch = dict(embed_dims=8, depths=[1] * 4, num_heads=[1] * 4)
    cfg.model.decode_head.update(in_channels=[8, 16, 32, 64], channels=8)
    cfg.model.auxiliary_head.update(in_channels=32, channels=8)
    return cfg


def batch(*sizes):
    samples = [SegDataSample(metainfo=dict(img_shape=size, ori_shape=size),
                             gt_sem_seg=PixelData(data=torch.randint(0, 15, (1, *size)))) for size in sizes]
    return dict(inputs=[torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes], data_samples=samples)


def test_images_and_labels_are_padded_as_without_an_enhancer():
    cfg = dict(type='mmseg.SegDataPreProcessor', mean=MEAN, std=STD, bgr_to_rgb=True, size=CROP)
    spy, data = Spy(), batch((64, 80), (60, 96))
    expected = MODELS.build(cfg)(copy.deepcopy(data), True)
    found = EnhancingPreprocessor(MODELS.build(cfg), spy, frozen=False, takes_rgb=False)(data, True)
    assert spy.sizes.tolist() == [[64, 80], [60, 96]]
    assert found['inputs'].shape[2:] == CROP and (found['inputs'][1, :, 60:] == 0).all()
    torch.testing.assert_close(found['inputs'], expected['inputs'], atol=1e-4, rtol=1e-5)
    for mine, other in zip(found['data_samples'], expected['data_samples'], strict=True):
        assert torch.equal(mine.gt_sem_seg.data, other.gt_sem_seg.data)


@pytest.mark.parametrize('frozen', [False, True])
def test_training_and_folding(frozen):
    cfg = small_config()
    cfg.model.freeze_enhancer = frozen
    model = spread(build_model(cfg)).train()
    enhancer = model.data_preprocessor.enhancer
    before = copy.deepcopy(enhancer.state_dict())
    loss, _ = model.parse_losses(model(**model.data_preprocessor(batch((64, 80), (60, 96)), True), mode='loss'))
    loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01).step()
    changed = {name for name, value in enhancer.state_dict().items() if not torch.equal(value, before[name])}
    assert not changed if frozen else 'global_branch.gamma.weight' in changed
    assert model.backbone.patch_embed.projection.weight.grad.abs().sum() > 0

    model.eval()
    data = batch((62, 80))
    expected, = model.test_step(copy.deepcopy(data))
    assert expected.pred_sem_seg.shape == (62, 80)
    report = fuse_norms(model)
    # UPerNet pools the last one and pads it, too; a test does not run the auxiliary head.
    assert {norm.norm for norm in report.kept} == {'backbone.norm3', 'auxiliary_head.convs.0.bn'}
    assert len(report.folded) > 40 and report.difference < 1e-4
    found, = model.test_step(data)
    torch.testing.assert_close(found.seg_logits.data, expected.seg_logits.data, atol=1e-4, rtol=1e-4)


def test_four_classes_are_left_out():
    cfg = small_config()
    dataset = DATASETS.build(dict(cfg.train_dataloader.dataset, type='mmseg.DarkZurichDataset',
                                  pipeline=[], lazy_init=True))
    assert len(dataset.metainfo['classes']) == cfg.model.decode_head.num_classes == 15
    left_out = [dataset.METAINFO['classes'][old] for old, new in dataset.label_map.items() if new == 255]
    assert left_out == ['rider', 'truck', 'bus', 'motorcycle']


@pytest.mark.slow
def test_the_tools_run_it_on_files_named_as_acdcs(in_a_folder, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.full((80, 120), 13, np.uint8)  # a car
    labels[:20] = 255
    for split in ('train', 'val'):
        for folder, suffix, image in (('rgb_anon', 'rgb_anon', rng.integers(0, 60, (80, 120, 3), dtype=np.uint8)),
                                        ('gt', 'gt_labelTrainIds', labels)):
            path = tmp_path / f'data/acdc/{folder}/night/{split}/GOPR0351'
            path.mkdir(parents=True)
            cv2.imwrite(str(path / f'GOPR0351_frame_000159_{suffix}.png'), image)
    cfg = small_config()
    cfg.train_cfg.update(max_iters=1, val_interval=1)
    cfg.default_hooks.checkpoint.interval = 1
    cfg.param_scheduler = []
    for split in ('train', 'val', 'test'):
        cfg[f'{split}_dataloader'].update(num_workers=0, persistent_workers=False)
    cfg.train_dataloader.batch_size = 2
    resize, crop = cfg.train_dataloader.dataset.pipeline[2:4]
    resize.scale, crop.crop_size = CROP[::-1], CROP
    cfg.dump('acdc.py')
    tiny_runs.call('train', 'acdc.py', '--work-dir', 'w')
    trained = tiny_runs.call('test', 'acdc.py', 'w/iter_1.pth', '--work-dir', 'w')
    folded = tiny_runs.call('test', 'acdc.py', 'w/iter_1.pth', '--work-dir', 'w', '--fuse')
    assert folded['aAcc'] == pytest.approx(trained['aAcc'], abs=0.5)
