"""BLEU and chrF by sacrebleu: of a test run, and a comparison of two systems."""
from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from mmengine.dist import get_world_size
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import METRICS

from mmunorm.deploy.formats.base import need
from mmunorm.utils import RunError, write_text
from projects.paper.paper.curves import METRICS as SCALARS

from .lines import check_line_counts, evenly_spaced, language_token, read_lines
from .subwords import Subwords

SCALARS['translation/BLEU'] = 'BLEU'


@METRICS.register_module()
class TranslationScore(BaseMetric):
    """BLEU and chrF of translations in percent, by sacrebleu. Logs their signatures and a few translations.

    The first hypothesis of each sentence is used. Sentences translated by several processes are counted once. If each
    source begins with a language token, there is also a score for each language, such as `BLEU/it`, and the total score
    is their mean.

    Args:
        subwords (str | os.PathLike): subword model to decode ids.
        reference (str | os.PathLike): the reference translations, as plain text.
        source (str | os.PathLike): the source text, shown with examples.
        data_root (str | os.PathLike): the root folder of these paths. Defaults to ''.
        out_file (str | os.PathLike, optional): file for the translations, one per line. Defaults to None.
        examples (int): number of evenly spaced translations to log. Defaults to 3.
        **kwargs: `collect_device` and `prefix` of mmengine's BaseMetric.

    Raises:
        PreflightError: sacrebleu or sentencepiece is not installed, or a file cannot be used.
    """

    default_prefix = 'translation'

    def __init__(self, subwords: str | os.PathLike, reference: str | os.PathLike, source: str | os.PathLike,
                 data_root: str | os.PathLike = '', out_file: str | os.PathLike | None = None, examples: int = 3,
                 **kwargs):
        super().__init__(**kwargs)
        self._metrics = _metrics()
        subwords, reference, source = (os.path.join(data_root, path) for path in (subwords, reference, source))
        self.subwords = Subwords(subwords)
        self.references, self.sources = list(read_lines(reference)), list(read_lines(source))
        check_line_counts([(source, len(self.sources)), (reference, len(self.references))])
        self.out_file, self.examples = out_file, examples

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Takes samples with `index` and `hypotheses`, the best first: ids without bos, eos and pad."""
        for sample in data_samples:
            self.results.append((int(sample['index']), self.subwords.decode(sample['hypotheses'][0])))

    def evaluate(self, size: int) -> dict[str, float]:
        """The scores over all processes."""
        # mmengine truncates results to the shortest list of a process, so each process returns one result, its list.
        self.results = [self.results]
        return super().evaluate(get_world_size())

    def compute_metrics(self, results: list[list[tuple[int, str]]]) -> dict[str, float]:
        """The scores of all processes' results.

        Raises:
            RunError: a sentence has no translation, or there are more translations than sentences.
        """
        texts = dict(result for part in results for result in part)
        if sorted(texts) != list(range(len(self.references))):
            raise RunError(f'there are {len(texts)} translations, but {len(self.references)} references: the test data '
                           'set must have the same text as the metric, and no max_length.')
        translations = [texts[i] for i in range(len(self.references))]
        if self.out_file is not None:
            write_text(self.out_file, ''.join(f'{text}\n' for text in translations))
        for i in evenly_spaced(len(translations), self.examples):
            print_log(f'line {i + 1}: {self.sources[i]}\n  reference:   {self.references[i]}\n'
                      f'  translation: {translations[i]}', 'current')
        scores, by_language = {}, {}
        groups = _lines_by_language(self.sources)
        for name, metric in self._metrics.items():
            language_scores = {
                language: metric.corpus_score([translations[i] for i in lines],
                                              [[self.references[i] for i in lines]]).score
                for language, lines in groups.items()}
            scores[name] = fmean(language_scores.values())
            print_log(f'{name} {scores[name]:.2f}, sacrebleu {metric.get_signature()}', 'current')
            if len(language_scores) > 1:
                by_language.update({f'{name}/{language}': score for language, score in language_scores.items()})
        return scores | by_language


def _lines_by_language(sources: Sequence[str]) -> dict[str, list[int]]:
    """The lines of each language of the language tokens; all lines under '' if a source has none."""
    groups: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        groups.setdefault(language_token(source)[2:-1], []).append(i)
    return {'': list(range(len(sources)))} if '' in groups else groups


class Comparison(NamedTuple):
    """Two systems' scores in percent, and sacrebleu's paired bootstrap of them.

    `intervals` has mean and half width of each system's 95 % interval. `p_value` is the probability of such a
    difference by chance. `signature` is sacrebleu's signature of the computation.
    """
    values: tuple[float, float]
    intervals: tuple[tuple[float, float], tuple[float, float]]
    p_value: float
    signature: str


def paired_bootstrap(a: Sequence[str], b: Sequence[str], references: Sequence[str],
                     samples: int = 1000) -> dict[str, Comparison]:
    """BLEU and chrF of two systems' translations, with intervals and p-value.

    Args:
        a, b, references: the same number of sentences; a is the baseline.
        samples: number of bootstrap samples.

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
        # sacrebleu counts differences greater than 0, so it would report equal outputs as different.
        p_value = 1. if list(a) == list(b) else pair[1].p_value
        comparisons[name] = Comparison(tuple(result.score for result in pair),
                                       tuple((result.mean, result.ci) for result in pair), p_value, str(signature))
    return comparisons


def _metrics() -> dict:
    need('sacrebleu')
    from sacrebleu.metrics import BLEU, CHRF
    return dict(BLEU=BLEU(), chrF=CHRF())
