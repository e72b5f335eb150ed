"""Makes parallel text and subwords from Debian's translated package descriptions."""
import argparse
import sys
from collections import Counter

from mmunorm.cli.arguments import command, positive
from projects.translation.translation.text.lines import language_token
from projects.translation.translation.text.made_text import LANGUAGES, make_translation


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='OUT gets train, valid and test, each as .src in English and .tgt, and '
        'subwords.model. apt downloads the text from the package sources of this system, without root and without '
        'installing anything. Each source package is in one of train, valid and test. The test set has '
        'sentences of at least 7 words, of whose 5-grams at most half occur in train. '
        'With several pairs, the files have the text of all, and a source begins with the language of its translation, '
        'such as "<2it> ".')
    parser.add_argument('--pair', nargs='+', choices=[f'en-{language}' for language in LANGUAGES], default=['en-it'],
                        help='languages (default: en-it)')
    parser.add_argument('--out', help='output folder (default: data/translation/en-LANGUAGES)')
    parser.add_argument('--vocab-size', type=positive, default=4000, help='number of subwords (default: 4000)')
    parser.add_argument('--force', action='store_true',
                        help='overwrite the whole folder OUT if this tool created it')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    languages = sorted({pair.removeprefix('en-') for pair in args.pair})
    out = args.out or f'data/translation/{"-".join(["en", *languages])}'
    split = make_translation(out, languages, args.vocab_size, args.force,
                             lambda message: print(f'{message} ...', file=sys.stderr, flush=True))
    if split is None:
        print(f'{out} already exists with these settings.')
        return
    for name in ('train', 'valid', 'test'):
        pairs = getattr(split, name)
        print(f'{out}/{name}.src, .tgt: {len(pairs)} pairs')
        for token, count in Counter(language_token(source) for source, _ in pairs).items():
            if token:
                print(f'  {token} {count}')
    print(f'The test set was chosen from {split.test_candidates} sentences of 7 words or more.')
    print(f'{out}/subwords.model: {args.vocab_size} subwords')


if __name__ == '__main__':
    main()
