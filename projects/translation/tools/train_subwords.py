"""Trains joint subwords of both languages on custom text, one sentence per line."""
import argparse

from mmunorm.cli.arguments import command, out_file, positive
from projects.translation.translation.text.subwords import train_subwords


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('texts', metavar='TEXT', nargs='+', help='training text, such as train.src train.tgt')
    parser.add_argument('--out', required=True, metavar='FILE', help='model to write, such as subwords.model')
    parser.add_argument('--vocab-size', type=positive, default=8000, help='number of subwords (default: 8000)')
    parser.add_argument('--type', choices=['unigram', 'bpe'], default='unigram', help='default: unigram')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    out_file(args.out, '--out', *args.texts)
    train_subwords(args.texts, args.out, args.vocab_size, args.type)
    print(f'{args.out}: {args.vocab_size} subwords')


if __name__ == '__main__':
    main()
