"""Computes how much the batch statistic of each norm fluctuates between batches, for one or several runs: the standard
deviation of its logarithm, and outlier steps. Writes spread.csv."""
import argparse

from mmunorm.cli.arguments import command, out_folder, positive
from projects.paper.paper.measures import batch_spread, write_csv
from projects.paper.paper.records import add_record_arguments, read_records

import numpy as np


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_record_arguments(parser, nargs='+')
    parser.add_argument('--span', type=positive, default=200, help='the last recorded steps that count (default: 200)')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    records, names = read_records(args.record)
    measures = {name: batch_spread(record, args.span) for name, record in zip(names, records, strict=True)}
    out = out_folder(args.out)
    write_csv(out / 'spread.csv', ('run', 'layer', 'spread', 'outlier_steps'),
              ((name, *row) for name, measure in measures.items() for row in zip(*measure, strict=True)))
    for name, (layers, spread, outliers) in measures.items():
        widest = int(np.nanargmax(spread))
        print(f'{name}: spread {np.nanmean(spread):.3f} on average, {spread[widest]:.3f} in {layers[widest]}; '
              f'{np.nansum(outliers):.0f} outlier steps of {np.isfinite(outliers).sum() * args.span}')
    print(f'written: {out}/spread.csv')


if __name__ == '__main__':
    main()
