import pytest

from mmunorm import utils
from mmunorm.translation.text.scores import corpus_scores, paired_bootstrap
from mmunorm.utils import PreflightError

REFERENCES = [f'the program number {i} reads a large file and writes {i + 1} new lines' for i in range(40)]
# Every third sentence has other words in it.
WORSE = [text.replace('reads a large', 'sees some') if i % 3 == 0 else text for i, text in enumerate(REFERENCES)]


def test_scores_are_sacrebleus():
    sacrebleu = pytest.importorskip('sacrebleu')
    scores = corpus_scores(WORSE, REFERENCES)
    assert list(scores) == ['BLEU', 'chrF']
    assert scores['BLEU'].value == sacrebleu.corpus_bleu(WORSE, [REFERENCES]).score
    assert scores['chrF'].value == sacrebleu.corpus_chrf(WORSE, [REFERENCES]).score
    assert scores['BLEU'].signature.startswith('nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:')
    assert 'chrF' not in scores['BLEU'].signature and '|nc:6|nw:0|' in scores['chrF'].signature
    assert all(score.value == pytest.approx(100) for score in corpus_scores(REFERENCES, REFERENCES).values())


def test_bootstrap_tells_a_real_difference_from_none():
    pytest.importorskip('sacrebleu')
    for name, found in paired_bootstrap(WORSE, REFERENCES, REFERENCES, samples=200).items():
        assert found.values[0] == corpus_scores(WORSE, REFERENCES)[name].value
        assert found.values[1] == pytest.approx(100)
        (mean, half), (_, none) = found.intervals
        assert half > 0.5 and abs(mean - found.values[0]) < half and none == pytest.approx(0)
        assert found.p_value < 0.01 and '|bs:200|seed:12345|' in found.signature
    same = paired_bootstrap(WORSE, WORSE, REFERENCES, samples=20)
    assert all(found.p_value == 1 and found.values[0] == found.values[1] for found in same.values())


def test_without_sacrebleu_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.setattr(utils, 'find_spec', lambda name: None)
    with pytest.raises(PreflightError, match=r'BLEU and chrF need sacrebleu: .*mmunorm\[translate\]'):
        corpus_scores(['a'], ['a'])
