"""Make parallel text and subwords from Debian's translated package descriptions."""
import sys
from collections import Counter

from mmunorm.cli.arguments import command, positive
from projects.digits.digits.data_tools import data_parser, run_maker
from projects.translation.translation.text.debian_folder import LANGUAGES, make_translation
from projects.translation.translation.text.lines import language_token


def parse_args(argv=None):
    parser = data_parser(
        __doc__, 'data/translation/en-LANGUAGES', 'OUT gets train, valid and test, each as .src in English and .tgt, '
        'and subwords.model. apt fetches the text from the package sources of this system, as an ordinary user, and '
        'changes nothing. A source package is in train, valid or test. The test set has '
        'sentences of 7 words or more of which at most half of the groups of 5 words occur in train. '
        'With several pairs, the files have the text of all, and a source begins with the language of its translation, '
        'such as "<2it> ".', seed=False)
    parser.add_argument('--pair', nargs='+', choices=[f'en-{language}' for language in LANGUAGES], default=['en-it'],
                        help='languages')
    parser.add_argument('--vocab-size', type=positive, default=4000, help='subwords of all')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    languages = sorted({pair.removeprefix('en-') for pair in args.pair})
    out = args.out.replace('LANGUAGES', '-'.join(languages))
    split = run_maker(make_translation, out, languages=languages, vocab_size=args.vocab_size, force=args.force,
                      log=lambda message: print(f'{message} ...', file=sys.stderr, flush=True))
    if split is None:
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
