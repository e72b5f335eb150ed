"""BLEU and chrF, by sacrebleu."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...utils import check_installed


class Score(NamedTuple):
    """A score in percent, and sacrebleu's signature, which says how it was computed."""
    value: float
    signature: str


class Comparison(NamedTuple):
    """Two systems' scores in percent, and sacrebleu's paired bootstrap of them.

    `intervals` has mean and half width of each system's 95 % interval. `p_value` is how likely so large a difference
    would be by chance.
    """
    values: tuple[float, float]
    intervals: tuple[tuple[float, float], tuple[float, float]]
    p_value: float
    signature: str


def corpus_scores(translations: Sequence[str], references: Sequence[str]) -> dict[str, Score]:
    """BLEU and chrF of translations, with sacrebleu's defaults.

    Args:
        translations, references: equally many sentences.

    Raises:
        PreflightError: sacrebleu is not installed.
    """
    scores = {}
    for name, metric in _metrics().items():
        value = metric.corpus_score(translations, [references]).score
        scores[name] = Score(value, str(metric.get_signature()))
    return scores


def paired_bootstrap(a: Sequence[str], b: Sequence[str], references: Sequence[str],
                     samples: int = 1000) -> dict[str, Comparison]:
    """BLEU and chrF of two systems' translations, with intervals and p-value.

    Args:
        a, b, references: equally many sentences; a is the baseline.
        samples: how many test sets to draw.

    Raises:
        PreflightError: sacrebleu is not installed.
    """
    metrics = _metrics()
    from sacrebleu.significance import PairedTest
    test = PairedTest([('a', a), ('b', b)], metrics, [references], test_type='bs', n_samples=samples)
    signatures, results = test()
    comparisons = {}
    for name, (key, signature) in zip(metrics, signatures.items(), strict=True):
        pair = results[key]
        # sacrebleu counts differences that are greater than none, and so calls equal outputs different.
        p_value = 1. if list(a) == list(b) else pair[1].p_value
        comparisons[name] = Comparison(tuple(result.score for result in pair),
                                       tuple((result.mean, result.ci) for result in pair), p_value, str(signature))
    return comparisons


def _metrics() -> dict:
    check_installed('sacrebleu', 'BLEU and chrF', 'translate')
    from sacrebleu.metrics import BLEU, CHRF
    return dict(BLEU=BLEU(), chrF=CHRF())
