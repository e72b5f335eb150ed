"""How an image is prepared for an exported model, beside the transforms of mmcv, mmpretrain and mmdet."""
import mmcv
import numpy as np
import pytest
import torch
from mmdet.models.roi_heads.mask_heads.fcn_mask_head import _do_paste_mask
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from PIL import Image

from mmunorm.deploy.preprocessing import apply_steps, loading_of, steps_of
from mmunorm.deploy.tasks.detector.objects import paste

from .. import tiny_runs

SIZES = [(40, 60), (300, 257)]


@pytest.mark.parametrize('scope, pipeline', [
    ('mmpretrain', [dict(type='ResizeEdge', scale=48, edge='short', backend='pillow', interpolation='bicubic'),
                    dict(type='CenterCrop', crop_size=40)]),
    ('mmpretrain', [dict(type='Resize', scale=32)]),
    ('mmpretrain', [dict(type='Resize', scale=(60, 40), interpolation='bicubic')]),
    ('mmdet', [dict(type='Resize', scale=(96, 72), keep_ratio=True)]),
])
@pytest.mark.parametrize('size', SIZES)
def test_as_the_test_pipeline(scope, pipeline, size):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    with DefaultScope.overwrite_default_scope(scope):
        expected = Compose(pipeline)(dict(img=image, img_shape=size, ori_shape=size))['img']
    ours = apply_steps(image, steps_of(pipeline))
    assert ours.shape == expected.shape and np.array_equal(ours, expected)


@pytest.mark.parametrize('name', ['swin_t_un_imagenet', 't2t_vit_14_un_cifar10', 'swin_t_un_maskrcnn_1x'])
def test_the_pipelines_of_the_recipes_are_known(name):
    cfg = Config.fromfile(tiny_runs.ROOT / 'configs' / f'{name}.py')
    steps_of(cfg.test_dataloader.dataset.pipeline)


def test_images_are_read_as_the_test_pipeline_reads_them(tmp_path):
    """Turned or not, and resized as floating point."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 20, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side
    image.save(tmp_path / 'a.jpg', exif=exif)
    for how in (dict(), dict(color_type='color_ignore_orientation', to_float32=True, imdecode_backend='pillow')):
        pipeline = [dict(type='LoadImageFromFile', **how), dict(type='Resize', scale=(25, 25))]
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            expected = Compose(pipeline)(dict(img_path=str(tmp_path / 'a.jpg')))['img']
        ours = apply_steps(mmcv.imread(str(tmp_path / 'a.jpg'), **loading_of(pipeline)), steps_of(pipeline))
        assert ours.dtype == expected.dtype and np.array_equal(ours, expected)
    assert loading_of(pipeline[1:]) == {}


@pytest.mark.parametrize('kind', ['grayscale', 'unchanged'])
def test_images_that_are_not_in_colour(kind):
    with pytest.raises(ValueError, match=f"LoadImageFromFile with color_type='{kind}' is not supported"):
        steps_of([dict(type='LoadImageFromFile', color_type=kind)])


def test_an_unknown_transform_is_named():
    with pytest.raises(ValueError, match='Pad is not supported by exported models'):
        steps_of([dict(type='mmdet.Pad', size=(3, 3))])


@pytest.mark.parametrize('box', [(3.2, 4.7, 20.1, 17.9), (-4., -6., 30., 12.), (25., 20., 44., 33.), (5., 5., 5., 9.)])
def test_masks_are_pasted_as_mmdet_does(box):
    mask = np.random.default_rng(0).random((7, 7), np.float32)
    ours = paste(mask, box, 30, 40, 0.5)
    expected, _ = _do_paste_mask(torch.from_numpy(mask)[None, None], torch.tensor([box]), 30, 40, skip_empty=False)
    if box[0] == box[2]:
        assert not ours.any()
    else:
        clear = (expected[0] - 0.5).abs().numpy() > 1e-4
        assert (ours == (expected[0] >= 0.5).numpy())[clear].all() and clear.mean() > 0.99 and ours.any()
