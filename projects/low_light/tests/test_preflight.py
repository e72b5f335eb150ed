import pytest
from mmengine.config import Config

import projects.low_light.low_light  # noqa: F401  registers its data sets
from mmunorm.cli.preflight import check_data
from mmunorm.utils import PreflightError


@pytest.mark.parametrize('root, img, message', [
    ('data', 'digits_dark/train', 'make_dark.py'), ('data/lol_v1', 'our485/low', 'LOLdataset.zip'),
    ('data/lol_v2/Real_captured', 'Train/Low', 'LOL-v2'),
    ('data/exposure', 'training/INPUT_IMAGES', 'Exposure_Correction')])
def test_how_to_get_pairs(root, img, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / root / 'target').mkdir(parents=True)
    (tmp_path / root / 'target/1.png').write_text('')
    dataset = dict(type='PairDataset', data_root=root, data_prefix=dict(img=img, target='target'))
    with pytest.raises(PreflightError, match=f'no folder {root}/{img}, or it is empty.*{message}'):
        check_data(Config(dict(train_dataloader=dict(dataset=dataset))), ['train'])


def test_exdark_is_checked_as_coco_is(tmp_path):
    dataset = dict(type='ExDarkDataset', data_root=str(tmp_path), ann_file='a.json', data_prefix=dict(img=''))
    cfg = Config(dict(train_dataloader=dict(dataset=dataset)))
    with pytest.raises(PreflightError, match='exdark_to_coco.py'):
        check_data(cfg, ['train'])
    (tmp_path / 'a.json').write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(PreflightError, match='a.json'):
        check_data(cfg, ['train'])
