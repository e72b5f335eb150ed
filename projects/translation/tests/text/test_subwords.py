import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmunorm.utils import PreflightError
from projects.translation.translation.text import EOS, UNK, Subwords
from projects.translation.translation.text.subwords import train_subwords

from .conftest import VOCAB_SIZE
from .makers import sentence_pairs, write_pairs


def test_sentences_come_back(text):
    subwords = Subwords(text / 'subwords.model')
    assert len(subwords) == VOCAB_SIZE
    for pair in sentence_pairs(20, seed=1):
        encoded = subwords.encode(list(pair))
        assert encoded == [subwords.encode(side) for side in pair]
        assert [subwords.decode(ids) for ids in encoded] == list(pair)
    assert subwords.decode(subwords.encode('the 漢!')) == 'the 漢!'


PIECES = ['</s>', '<s>', '<pad>', '</', 's>', ' ', '\0', '\n', 'é', '漢', '▁', 'the']


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(PIECES)).map(''.join))
def test_no_text_has_the_id_of_eos(text, sentence):
    subwords = Subwords(text / 'subwords.model')
    ids = subwords.encode(sentence)
    assert all(i == UNK or EOS < i < VOCAB_SIZE for i in ids)


def test_invalid_models(text, tmp_path):
    from sentencepiece import SentencePieceTrainer
    with pytest.raises(PreflightError, match='train.src is not a sentencepiece model'):
        Subwords(text / 'train.src')
    with pytest.raises(PreflightError, match='cannot read the subword model .*none: No such file'):
        Subwords(tmp_path / 'none')
    (tmp_path / 'empty').touch()
    with pytest.raises(PreflightError, match='empty is not a sentencepiece model'):
        Subwords(tmp_path / 'empty')
    with open(tmp_path / 'a.model', 'wb') as file:
        SentencePieceTrainer.train(sentence_iterator=iter(['a b c'] * 9), model_writer=file, vocab_size=7,
                                   minloglevel=2)
    with pytest.raises(PreflightError, match="'pad': -1, 'unk': 0.* instead of .*'pad': 0, 'unk': 1"):
        Subwords(tmp_path / 'a.model')


def test_a_failure_keeps_the_old_model(text, tmp_path):
    path = tmp_path / 'a.model'
    path.write_text('old')
    with pytest.raises(PreflightError, match='no 9999 subwords can be trained on .*train.src: .*too high'):
        train_subwords([text / 'train.src'], path, 9999)
    (tmp_path / 'bad').write_text('a\n\n')
    with pytest.raises(PreflightError, match='bad, line 2'):
        train_subwords([text / 'train.src', tmp_path / 'bad'], path)
    (tmp_path / 'none').touch()
    with pytest.raises(PreflightError, match='none: no text'):
        train_subwords([tmp_path / 'none'], path)
    assert path.read_text() == 'old' and len(list(tmp_path.iterdir())) == 3


def test_the_machine_has_no_part_in_the_ids(text, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        train_subwords([text / 'train.src', text / 'train.tgt'], tmp_path / 'a.model', VOCAB_SIZE)
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / 'a.model').read_bytes() == (text / 'subwords.model').read_bytes()


def test_a_language_token_is_one_subword(tmp_path):
    pairs = sentence_pairs(200)
    tokens = ['<2de>', '<2it>']
    sources, targets = write_pairs(tmp_path, 'train', [(f'{tokens[i % 2]} {a}', b) for i, (a, b) in enumerate(pairs)])
    for kind in 'unigram', 'bpe':
        train_subwords([sources, targets], tmp_path / 'a.model', VOCAB_SIZE, kind)
        subwords = Subwords(tmp_path / 'a.model')
        ids = [subwords.encode(f'{token} the file') for token in tokens]
        assert ids == [[first, *subwords.encode('the file')] for first in (EOS + 1, EOS + 2)]
        assert [subwords.decode(tokens) for tokens in ids] == [f'{token} the file' for token in tokens]
        assert len(subwords) == VOCAB_SIZE
