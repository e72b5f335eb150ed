import pytest
from mmengine.config import Config

import projects.translation.translation  # noqa: F401  registers its data set
from mmunorm.cli.preflight import check_data
from mmunorm.utils import PreflightError


@pytest.mark.parametrize('folder, expected', [
    ('en-it', 'make_translation.py --pair en-it`'), ('en-de-fr-it', '--pair en-de en-fr en-it`'),
    ('mine', 'train_subwords.py')])
def test_text(folder, expected):
    dataset = dict(type='TranslationDataset', data_root=f'data/translation/{folder}', source='train.src',
                   target='train.tgt', subwords='subwords.model')
    with pytest.raises(PreflightError, match=expected) as found:
        check_data(Config(dict(train_dataloader=dict(dataset=dataset))), ['train'])
    message = str(found.value)
    assert all(f'no file data/translation/{folder}/{dataset[name]}' in message
               for name in ('source', 'target', 'subwords'))
