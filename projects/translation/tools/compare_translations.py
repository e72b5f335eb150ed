"""Compares two systems' translations: BLEU and chrF with intervals, and a paired bootstrap test, by sacrebleu."""
import argparse

from mmunorm.cli.arguments import command, positive
from mmunorm.utils import PreflightError
from projects.translation.translation.text.lines import check_line_counts, evenly_spaced, read_lines
from projects.translation.translation.text.metric import paired_bootstrap


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='All files are plain text, one sentence per line. The p-value is the probability '
        'of such a difference by chance. SACREBLEU_SEED in the environment sets the seed.')
    parser.add_argument('reference', metavar='REFERENCE', help='the reference translations')
    parser.add_argument('a', metavar='A', help='translations of the baseline')
    parser.add_argument('b', metavar='B', help='translations of the other system')
    parser.add_argument('--source', metavar='FILE', help='the source text, shown with --examples')
    parser.add_argument('--examples', type=positive, metavar='N',
                        help='also print N evenly spaced translations side by side')
    parser.add_argument('--samples', type=positive, default=1000, help='number of resampled test sets (default: 1000)')
    args = parser.parse_args(argv)
    if args.source and not args.examples:
        parser.error('--source is for --examples N')
    return args


@command
def main(argv=None):
    args = parse_args(argv)
    paths = dict(source=args.source, reference=args.reference, A=args.a, B=args.b)
    texts = {name: list(read_lines(path, allow_empty=name in 'AB')) for name, path in paths.items() if path}
    check_line_counts([(paths[name], len(text)) for name, text in texts.items()])
    if len(texts['reference']) < 2:
        raise PreflightError(f'{args.reference} has one line: a bootstrap needs more.')
    comparisons = paired_bootstrap(texts['A'], texts['B'], texts['reference'], args.samples)
    print(f'A: {args.a}\nB: {args.b}\n\n'
          '|  | A | 95 % of A | B | 95 % of B | B - A | p |\n|---|---|---|---|---|---|---|')
    for name, (values, intervals, p_value, _) in comparisons.items():
        cells = [name]
        for value, (mean, half) in zip(values, intervals, strict=True):
            cells += [f'{value:.2f}', f'{mean - half:.2f} to {mean + half:.2f}']
        print(f'| {" | ".join(cells)} | {values[1] - values[0]:+.2f} | {p_value:.4f} |')
    print()
    for name, comparison in comparisons.items():
        print(f'{name}: sacrebleu {comparison.signature}')
    for i in evenly_spaced(len(texts['reference']), args.examples or 0):
        print(f'\nline {i + 1}', *(f'{name:10} {text[i]}' for name, text in texts.items()), sep='\n')


if __name__ == '__main__':
    main()
