import pytest
import torch
from mmengine.registry import METRICS

from mmunorm.utils import PreflightError, RunError
from projects.translation.translation.text import Subwords, TranslationDataset, TranslationScore, metric
from tests import processes

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
    """Samples as a model returns them, the best hypothesis first."""
    return [dict(index=i, hypotheses=[torch.tensor(subwords.encode(TRANSLATIONS[i]), dtype=torch.int64),
                                      torch.tensor([5])], scores=[-1., -2.]) for i in indices]


def scores(translations, references):
    """sacrebleu's scores."""
    import sacrebleu
    return {'translation/BLEU': sacrebleu.corpus_bleu(translations, [references]).score,
            'translation/chrF': sacrebleu.corpus_chrf(translations, [references]).score}


def test_scores_in_any_order_and_their_file(settings, tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(metric, 'print_log', lambda message, logger: messages.append(message))
    settings.update(source='test.src', reference='test.tgt', data_root=tmp_path)
    score = METRICS.build(dict(type='TranslationScore', out_file=tmp_path / 'out', examples=2, **settings))
    for indices in ([3, 11, 0, 1, 2], [10, 9, 8, 7, 6, 5, 4]):
        score.process({}, samples(score.subwords, indices))
    expected = scores(TRANSLATIONS, REFERENCES)
    assert score.evaluate(12) == expected and 0 < expected['translation/BLEU'] < 99
    assert (tmp_path / 'out').read_text().split('\n') == [*TRANSLATIONS, '']
    assert [message.partition('\n')[0] for message in messages[:2]] == [f'line {i + 1}: {SOURCES[i]}' for i in (3, 9)]
    assert messages[2].startswith(f'BLEU {expected["translation/BLEU"]:.2f}, sacrebleu nrefs:1|case:mixed|eff:no|tok')
    assert '|nc:6|nw:0|' in messages[3]
    # The next epoch starts without results.
    score.process({}, samples(score.subwords, range(12)))
    assert score.evaluate(12) == expected


def test_each_language_has_its_score_and_the_mean_is_that_of_all(settings, tmp_path):
    languages = [('de', 'it')[i % 3 == 0] for i in range(12)]
    sources = [f'<2{language}> {source}\n' for language, source in zip(languages, SOURCES, strict=True)]
    settings['source'].write_text(''.join(sources))
    score = TranslationScore(**settings)
    score.process({}, samples(score.subwords, range(12)))
    expected = {}
    for language in 'de', 'it':
        lines = [i for i in range(12) if languages[i] == language]
        of_one = scores([TRANSLATIONS[i] for i in lines], [REFERENCES[i] for i in lines])
        expected.update({f'{name}/{language}': value for name, value in of_one.items()})
    for name in 'translation/BLEU', 'translation/chrF':
        expected[name] = (expected[f'{name}/de'] + expected[f'{name}/it']) / 2
    found = score.evaluate(12)
    assert found == pytest.approx(expected) and found['translation/BLEU/de'] != found['translation/BLEU/it']
    # A sentence that names no language, or one language, has the plain score.
    for written in ([f'the {sources[0]}', *sources[1:]], [source.replace('<2de>', '<2it>') for source in sources]):
        settings['source'].write_text(''.join(written))
        score = TranslationScore(**settings)
        score.process({}, samples(score.subwords, range(12)))
        assert score.evaluate(12) == scores(TRANSLATIONS, REFERENCES)


def test_sentences_without_translation_and_texts_that_do_not_fit(settings, tmp_path):
    for indices, count in (([*range(6), *range(8, 12)], 11), (range(12), 13)):
        score = TranslationScore(**settings, out_file=tmp_path / 'out')
        score.process({}, samples(score.subwords, indices) + [dict(index=12, hypotheses=[[5]])])
        with pytest.raises(RunError, match=f'there are {count} translations, but 12 references'):
            score.evaluate(count)
    assert not (tmp_path / 'out').exists()
    settings['source'].write_text('a\n')
    with pytest.raises(PreflightError, match='test.src has 1 lines and .*test.tgt has 12 lines'):
        TranslationScore(**settings)


def two_processes(rank, settings, train):
    dataset = TranslationDataset(*train, settings['subwords'])
    score = TranslationScore(**settings)
    # One has fewer, and both have line 3.
    score.process({}, samples(Subwords(settings['subwords']), [3, *range(8, 12)] if rank else range(8)))
    return len(dataset), score.evaluate(12)


@pytest.mark.slow
def test_two_processes(settings, tmp_path):
    found = processes.run(two_processes, settings, write_pairs(tmp_path, 'train', PAIRS[:7]))
    assert found == [(7, scores(TRANSLATIONS, REFERENCES))] * 2
    assert len(list(tmp_path.glob('train.*.ids'))) == 2


def test_bootstrap_detects_a_real_difference():
    pytest.importorskip('sacrebleu')
    references = [f'the program number {i} reads a large file and writes {i + 1} new lines' for i in range(40)]
    # Every third sentence has other words in it.
    worse = [text.replace('reads a large', 'sees some') if i % 3 == 0 else text for i, text in enumerate(references)]
    expected = scores(worse, references)
    for name, found in metric.paired_bootstrap(worse, references, references, samples=200).items():
        assert found.values == (expected[f'translation/{name}'], pytest.approx(100))
        (mean, half), (_, none) = found.intervals
        assert half > 0.5 and abs(mean - found.values[0]) < half and none == pytest.approx(0)
        assert found.p_value < 0.01 and '|bs:200|seed:12345|' in found.signature
    same = metric.paired_bootstrap(worse, worse, references, samples=20)
    assert all(found.p_value == 1 and found.values[0] == found.values[1] for found in same.values())


@pytest.mark.parametrize('use, package', [
    (lambda: metric.paired_bootstrap(['a'], ['a'], ['a']), 'sacrebleu'),
    (lambda: TranslationScore('a', 'a', 'a'), 'sacrebleu'), (lambda: Subwords('a'), 'sentencepiece')])
def test_missing_packages_are_named(monkeypatch, use, package):
    monkeypatch.setattr('mmunorm.deploy.formats.base.find_spec', lambda name: None)
    with pytest.raises(PreflightError, match=f'missing: {package}; install with pip install .*{package}'):
        use()
