"""`pretrained`, `init_cfg` and `load_from` with files of every layout, in our Swin and the stock ones."""
import copy

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.runner import CheckpointLoader

from mmunorm.checkpoints.loading import load_weights
from mmunorm.checkpoints.reading import reading
from mmunorm.config.models import build_model
from mmunorm.config.pretrained import set_pretrained
from mmunorm.config.starting import fit_load_from, fit_pretrained
from mmunorm.utils import PreflightError

from ..checkpoints.test_layouts import classifier, official, timm_model
from ..fusion import models

STOCK = dict(type='mmdet.SwinTransformer', embed_dims=8, depths=(2, 2), num_heads=(2, 4), window_size=4, strides=(4, 2),
             out_indices=(0, 1))
SWINS = {
    'ours': models.swin_backbone(out_indices=(0, 1), norm_cfg=models.LN),
    'mmpretrain': models.swin_backbone(type='mmpretrain.SwinTransformer', norm_cfg=models.LN),
    'mmdet': STOCK,
    'mmdet, official names': dict(STOCK, convert_weights=True),
}


def starting_from(path, kind):
    cfg = Config(dict(model=dict(backbone=copy.deepcopy(SWINS[kind])), default_scope='mmpretrain', work_dir='w'))
    set_pretrained(cfg, path)
    return cfg


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """A folder with one model in all layouts, and the model."""
    folder = tmp_path_factory.mktemp('layouts')
    torch.manual_seed(0)
    source = timm_model('swin')
    named = classifier('swin', models.LN)
    content = official(source.state_dict())
    torch.save(content, folder / 'official.pth')
    torch.save(source.state_dict(), folder / 'timm.pth')
    load_weights(named, str(folder / 'timm.pth'))
    torch.save(dict(state_dict=named.state_dict()), folder / 'mmpretrain.pth')
    torch.save(named.backbone.state_dict(), folder / 'backbone.pth')
    return folder, named


@pytest.mark.parametrize('layout', ['official', 'timm', 'mmpretrain', 'backbone'])
@pytest.mark.parametrize('kind', SWINS)
@pytest.mark.usefixtures('in_a_folder')
def test_every_layout_starts_every_swin(kind, layout, files):
    folder, source = files
    cfg = starting_from(str(folder / f'{layout}.pth'), kind)
    fit_pretrained(cfg)
    backbone = MODELS.build(copy.deepcopy(cfg.model.backbone))
    backbone.init_weights()
    expected = source.backbone.state_dict()
    for name, value in backbone.state_dict().items():
        if name in expected and not name.startswith('norm0'):
            assert torch.equal(value, expected[name]), name


def test_a_file_that_fits_stays(in_a_folder, files, tmp_path):
    path = str(files[0] / 'mmpretrain.pth')
    for kind in ('ours', 'mmdet'):
        cfg = starting_from(path, kind)
        fit_pretrained(cfg)
        assert cfg.model.backbone.init_cfg.checkpoint == path
    assert not (tmp_path / 'w').exists()


def test_a_file_that_fits_nowhere_is_refused(in_a_folder, tmp_path):
    torch.save(timm_model('vit').state_dict(), 'vit.pth')
    torch.save(dict(conv1=torch.ones(3, 3)), 'other.pth')
    torch.save(dict(epoch=3), 'empty.pth')
    torch.save(timm_model('swin', img_size=32, num_classes=5, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
                          window_size=4).state_dict(), 'wide.pth')
    for path in ('vit.pth', 'other.pth', 'empty.pth', 'wide.pth'):
        for kind in SWINS:
            with pytest.raises(PreflightError, match=f'checkpoint {path} does not fit the config: no weight has a '):
                fit_pretrained(starting_from(path, kind))
    assert not (tmp_path / 'w').exists()


@pytest.mark.parametrize('layout', ['official', 'timm'])
@pytest.mark.usefixtures('in_a_folder')
def test_a_whole_model_starts_from_published_weights(layout, files):
    folder, source = files
    model = models.classifier_cfg(models.swin_backbone(norm_cfg=models.LN), 16)
    cfg = Config(dict(model=model, default_scope='mmpretrain', work_dir='w', load_from=str(folder / f'{layout}.pth')))
    fit_load_from(cfg)
    assert cfg.load_from == 'w/load_from.pth'
    model = build_model(cfg)
    loaded = CheckpointLoader.load_checkpoint(cfg.load_from)['state_dict']
    model.load_state_dict(loaded)
    for name, value in source.backbone.state_dict().items():
        assert torch.equal(model.backbone.state_dict()[name], value)
    fit_load_from(cfg)  # now it fits
    assert cfg.load_from == 'w/load_from.pth'


def test_a_run_of_an_older_mmdet_is_not_resumed(in_a_folder):
    """mmengine would execute the text of its config."""
    torch.save(dict(state_dict={}, meta=dict(epoch=1, iter=3, config="open('marker', 'w')")), 'old.pth')
    cfg = Config(dict(model=dict(), load_from='old.pth', resume=True))
    with pytest.raises(PreflightError, match='old.pth is of an older mmdet or mmcls: mmengine would run the config'):
        fit_load_from(cfg)
    with reading(trusted=True):
        fit_load_from(cfg)
