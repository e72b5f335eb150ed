import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.structures import BaseDataElement

from projects.low_light.low_light import ImageEnhancer


@pytest.fixture
def model():
    return ImageEnhancer(dict(type='IAT', norm_cfg=dict(type='UN', warmup_iters=2)))


def pairs(*sizes):
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    return dict(inputs=[image // 8 for image in images],
                data_samples=[BaseDataElement(target=image, metainfo=dict(img_path=f'{i}.png'))
                              for i, image in enumerate(images)])


def test_images_come_as_rgb_in_0_to_1(model):
    data = pairs((8, 9))
    expected = data['inputs'][0].flip(0) / 255., data['data_samples'][0].target.flip(0) / 255.
    prepared = model.data_preprocessor(data)
    torch.testing.assert_close((prepared['inputs'][0], prepared['data_samples'][0].target), expected)


def test_a_step_of_training_is_one_of_l1(model):
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), 0.))
    logged = model.train_step(pairs((16, 16), (16, 16)), optim_wrapper)
    assert logged.keys() == {'loss'} and 0 < logged['loss'] < 1
    assert int(model.backbone.global_branch.norm1.num_batches_tracked) == 1


@pytest.mark.parametrize('sizes', [((8, 9), (5, 12)), ((7, 7), (7, 7))])
def test_images_of_any_sizes_are_enhanced_as_alone(model, sizes):
    model.eval()
    samples = model.test_step(pairs(*sizes))
    assert [tuple(sample.pred.shape[1:]) for sample in samples] == list(sizes)
    alone = model([samples[1].before])[0]
    torch.testing.assert_close(samples[1].pred, alone, atol=1e-5, rtol=1e-4)
    assert alone.min() >= 0 and alone.max() <= 1


def test_without_data_samples(model):
    sample, = model.eval()([torch.rand(3, 4, 4)], mode='predict')
    assert sample.pred.shape == (3, 4, 4)


def test_unknown_mode(model):
    with pytest.raises(ValueError, match="got 'train'"):
        model.eval()([torch.rand(3, 4, 4)], mode='train')
