import pytest
import torch
from mmengine.registry import METRICS

from mmunorm.translation.text import Subwords, TranslationScore, metric
from mmunorm.translation.text.scores import corpus_scores
from mmunorm.utils import PreflightError, RunError

from ... import processes
from .makers import sentence_pairs, write_pairs

PAIRS = sentence_pairs(12, seed=4)
SOURCES, REFERENCES = zip(*PAIRS, strict=True)
# Line 4 is wrong, and line 5 is empty.
TRANSLATIONS = [*REFERENCES[:4], REFERENCES[0], '', *REFERENCES[6:]]


@pytest.fixture
def settings(text, tmp_path):
    pytest.importorskip('sacrebleu')
    source, reference = write_pairs(tmp_path, 'test', PAIRS)
    return dict(subwords=text / 'subwords.model', source=source, reference=reference)


def samples(subwords, indices):
    """As a model gives them, of which the first hypothesis is best."""
    return [dict(index=i, hypotheses=[torch.tensor(subwords.encode(TRANSLATIONS[i]), dtype=torch.int64),
                                      torch.tensor([5])], scores=[-1., -2.]) for i in indices]


def test_scores_in_any_order_and_their_file(settings, tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(metric, 'print_log', lambda message, logger: messages.append(message))
    settings.update(source='test.src', reference='test.tgt', data_root=tmp_path)
    score = METRICS.build(dict(type='TranslationScore', out_file=tmp_path / 'out', examples=2, **settings))
    for indices in ([3, 11, 0, 1, 2], [10, 9, 8, 7, 6, 5, 4]):
        score.process({}, samples(score.subwords, indices))
    expected = corpus_scores(TRANSLATIONS, REFERENCES)
    assert score.evaluate(12) == {f'translation/{name}': each.value for name, each in expected.items()}
    assert score.scores == expected and expected['BLEU'].value < 99
    assert (tmp_path / 'out').read_text().split('\n') == [*TRANSLATIONS, '']
    assert [message.partition('\n')[0] for message in messages[:2]] == [
        f'line {i + 1}: {SOURCES[i]}' for i in (3, 9)]
    assert messages[2] == f'BLEU {expected["BLEU"].value:.2f}, sacrebleu {expected["BLEU"].signature}'
    # The next epoch starts anew.
    score.process({}, samples(score.subwords, range(12)))
    assert score.evaluate(12)['translation/BLEU'] == expected['BLEU'].value


def test_sentences_without_translation_and_texts_that_do_not_fit(settings, tmp_path):
    score = TranslationScore(**settings, out_file=tmp_path / 'out')
    score.process({}, samples(score.subwords, [*range(6), *range(8, 12)]))
    with pytest.raises(RunError, match='2 of 12 sentences have no translation, such as line 7'):
        score.evaluate(12)
    assert not (tmp_path / 'out').exists()
    score = TranslationScore(**settings)
    score.process({}, samples(score.subwords, range(12)) + [dict(index=12, hypotheses=[[5]])])
    with pytest.raises(RunError, match='13 translations, but 12 references'):
        score.evaluate(13)
    settings['source'].write_text('a\n')
    with pytest.raises(PreflightError, match='test.src has 1 lines and .*test.tgt has 12 lines'):
        TranslationScore(**settings)


def two_processes(rank, settings, train):
    from mmunorm.translation.text import TranslationDataset
    dataset = TranslationDataset(*train, settings['subwords'])
    score = TranslationScore(**settings)
    # One has fewer, and both have line 3.
    score.process({}, samples(Subwords(settings['subwords']), [3, *range(8, 12)] if rank else range(8)))
    return len(dataset), score.evaluate(12)


@pytest.mark.slow
def test_two_processes(settings, tmp_path):
    found = processes.run(two_processes, settings, write_pairs(tmp_path, 'train', PAIRS[:7]))
    expected = {f'translation/{name}': each.value for name, each in corpus_scores(TRANSLATIONS, REFERENCES).items()}
    assert found == [(7, expected)] * 2
    assert len(list(tmp_path.glob('train.*.ids'))) == 2
