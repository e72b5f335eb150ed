"""Training images for a calibration: the test pipeline, the same images each time."""
import pytest
import torch
from mmengine.config import Config

from mmunorm.cli.arguments import set_dataloader_defaults
from mmunorm.engine.calibration import training_batches
from mmunorm.utils import PreflightError

from .. import tiny_runs


@pytest.fixture
def cfg(tmp_path):
    cfg = Config.fromfile(tiny_runs.write_classifier(tmp_path))
    set_dataloader_defaults(cfg)
    return cfg


def test_images_are_not_augmented_and_always_the_same(cfg):
    flip = dict(type='RandomFlip', prob=1.0, direction='vertical')
    plain = training_batches(cfg, 4)
    cfg.train_dataloader.dataset.pipeline.insert(1, flip)
    before = cfg.to_dict()
    again = training_batches(cfg, 4)
    assert all(torch.equal(a['inputs'], b['inputs']) for a, b in zip(plain, again, strict=True))
    assert cfg.to_dict() == before
    cfg.test_dataloader = None  # then the loader's own pipeline is used
    assert not torch.equal(training_batches(cfg, 4)[0]['inputs'], plain[0]['inputs'])


def test_whole_batches_until_there_are_enough(cfg):
    assert [len(training_batches(cfg, samples)) for samples in (1, 3, 100)] == [1, 2, 2]
    cfg.train_dataloader.sampler = dict(type='mmdet.InfiniteSampler', shuffle=True)
    assert len(training_batches(cfg, 7)) == 4


def test_the_pipeline_inside_of_wrappers(cfg):
    """The test pipeline replaces that of single images; transforms that mix images are dropped."""
    plain = training_batches(cfg, 4)
    dataset = cfg.train_dataloader.dataset
    dataset.pipeline.insert(1, dict(type='RandomFlip', prob=1.0, direction='vertical'))
    joined = dict(type='ConcatDataset', datasets=[dataset])
    for wrapped in (dict(type='RepeatDataset', times=1, dataset=joined),
                    dict(type='MultiImageMixDataset', dataset=dataset, pipeline=[dict(type='Unknown')])):
        cfg.train_dataloader.dataset = wrapped
        images = training_batches(cfg, 4)
        assert all(torch.equal(a['inputs'], b['inputs']) for a, b in zip(plain, images, strict=True))


def test_errors(cfg):
    cfg.train_dataloader = None
    with pytest.raises(PreflightError, match='classifier.py has no train_dataloader'):
        training_batches(cfg, 4)
