import pytest

from .makers import sentence_pairs, write_pairs

VOCAB_SIZE = 320  # 256 of them bytes


@pytest.fixture(scope='session')
def text(tmp_path_factory):
    """A folder with train.src, train.tgt and subwords.model. Tests do not write there."""
    pytest.importorskip('sentencepiece')
    from projects.translation.translation.text.subwords import train_subwords
    folder = tmp_path_factory.mktemp('text')
    train_subwords(write_pairs(folder, 'train', sentence_pairs(200)), folder / 'subwords.model', VOCAB_SIZE)
    return folder
