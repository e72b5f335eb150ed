"""Adds typing errors to a text of one sentence per line, to test the robustness of translation."""
import argparse
import random

from mmunorm.cli.arguments import command, fraction, out_file
from mmunorm.utils import write_text
from projects.translation.translation.text.lines import read_lines
from projects.translation.translation.text.noise import KINDS, add_noise


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('text', help='text to read, such as test.src')
    parser.add_argument('out', help='text to write')
    parser.add_argument('--share', type=fraction, default=0.1,
                        help='share of words with an error, of those with at least two letters (default: 0.1)')
    parser.add_argument('--kinds', nargs='+', choices=KINDS, default=list(KINDS), help='default: all')
    parser.add_argument('--seed', type=int, default=0, help='default: 0')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    out_file(args.out, 'out', args.text)
    rng = random.Random(args.seed)
    lines = list(read_lines(args.text))
    noisy = [add_noise(line, args.share, args.kinds, rng) for line in lines]
    write_text(args.out, ''.join(f'{line}\n' for line in noisy))
    print(f'{args.out}: {sum(map(str.__ne__, lines, noisy))} of {len(lines)} lines have errors')


if __name__ == '__main__':
    main()
