"""From a checkpoint to a folded one, and through every tool and API that a user loads it with."""
import copy
import pickle

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import load_checkpoint

from mmunorm import fuse_norms
from mmunorm.checkpoints.folded import save_folded
from mmunorm.config.models import build_model, match_folded

from .. import tiny_runs
from ..fusion import models

pytestmark = pytest.mark.usefixtures('in_a_folder')


@pytest.fixture
def folded(classifier, tmp_path):
    """The tiny classifier's config, as a file and read; `unfolded.pth` has random statistics, and `folded.pth`."""
    cfg = Config.fromfile(classifier[0])
    model = models.randomize(build_model(cfg))
    meta = dict(dataset_meta=dict(classes=('dark', 'light')))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), 'unfolded.pth')
    save_folded(model, 'folded.pth', cfg, fuse_norms(model, strict=True), meta)
    return classifier[0], cfg


def predictions(path):
    with open(path, 'rb') as file:
        return pickle.load(file)


@pytest.mark.slow
def test_a_classifier_is_tested_folded(folded, tmp_path):
    config, cfg = folded
    fuse_and_save = 'unfolded.pth', '--fuse', '--save', 'new/kept.pth'
    runs = dict(a=('unfolded.pth', ), b=fuse_and_save, c=('folded.pth', '--fuse'))
    metrics = [tiny_runs.call('test', config, *arguments, '--out', f'{name}.pkl', '--work-dir', name)
               for name, arguments in runs.items()]
    assert metrics[0] == metrics[1] == metrics[2]
    scores = [torch.stack([sample['pred_score'] for sample in predictions(f'{name}.pkl')]) for name in runs]
    for others in scores[1:]:
        torch.testing.assert_close(others, scores[0])
    logs = [next(tmp_path.glob(f'{name}/*/*.log')).read_text() for name in runs]
    assert 'fuse_norms' not in logs[0]
    assert 'fuse_norms: 7 norms: 7 folded\n' in logs[1] and 'its norms are folded already' in logs[2]
    kept, saved = (torch.load(path, weights_only=True) for path in ('new/kept.pth', 'folded.pth'))
    assert kept['state_dict'].keys() == saved['state_dict'].keys()
    torch.testing.assert_close(*(models.tensors(file['state_dict']) for file in (kept, saved)), rtol=0, atol=0)
    assert all(kept['meta'][key] == saved['meta'][key] for key in ('dataset_meta', 'mmunorm'))
    note = saved['meta']['mmunorm']
    assert note['folded']['backbone.patch_embed.norm'] == 'back into backbone.patch_embed.projection'
    assert len(note['folded']) == 7 and note['kept'] == {}
    assert saved['meta']['dataset_meta'] == dict(classes=('dark', 'light'))
    assert sorted(path.name for path in tmp_path.glob('*folded.pth*')) == ['folded.pth', 'unfolded.pth']


def test_infer_and_the_classification_inferencer_load_it(folded, trained, tmp_path):
    from mmpretrain import ImageClassificationInferencer
    config, cfg = folded
    tiny_runs.call('infer', config, 'folded.pth', trained / 'data', '--out-dir', 'out', '--device', 'cpu')
    assert len([*(tmp_path / 'out').rglob('*.png')]) == 4
    image = str(trained / 'data/dark/0.png')

    def scores(config, checkpoint):
        inferencer = ImageClassificationInferencer(config, pretrained=str(checkpoint), device='cpu')
        return torch.as_tensor(inferencer(image)[0]['pred_scores'])

    folded_cfg = copy.deepcopy(cfg)
    match_folded(folded_cfg, 'folded.pth')
    torch.testing.assert_close(scores(folded_cfg, 'folded.pth'), scores(cfg, 'unfolded.pth'))
    with pytest.raises(RuntimeError, match='of a folded model.*fuse_norms'):
        scores(cfg, 'folded.pth')
    with pytest.raises(RuntimeError, match='this checkpoint is not'):
        scores(folded_cfg, 'unfolded.pth')


def test_an_unfolded_model_is_not_saved_and_a_manually_folded_one_loads_the_file(folded, tmp_path):
    _, cfg = folded
    model = models.randomize(build_model(cfg), seed=1)
    with pytest.raises(ValueError, match='call mmunorm.fuse_norms'):
        save_folded(model, tmp_path / 'new.pth', cfg)
    with pytest.raises(TypeError, match='^model: must be an nn.Module, got str'):
        save_folded('new.pth', model)
    assert not (tmp_path / 'new.pth').exists()
    fuse_norms(model)
    load_checkpoint(model, 'folded.pth', strict=True)
