"""Draws the PNAC of one or several runs (Eq. 15): the mean over training and by layer (Fig. 3), and the density at
start and end (Fig. 7). Writes the numbers as pnac.csv."""
import argparse

from mmunorm.cli.arguments import command, out_folder
from projects.paper.paper.figures import pnac_density_figure, pnac_figure, pnac_layers_figure
from projects.paper.paper.layout import save
from projects.paper.paper.measures import PNAC_HEADER, measure_pnac, write_csv
from projects.paper.paper.records import add_record_arguments, read_records, suffixes


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_record_arguments(parser, nargs='+')
    parser.add_argument('--span', type=int,
                        help='recorded steps of a span (default: 100, or all if there are fewer)')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    records, names = read_records(args.record)
    measures = {name: measure_pnac(record, args.span)
                for name, record in zip(names, records, strict=True)}
    out = out_folder(args.out)
    write_csv(out / 'pnac.csv', PNAC_HEADER,
              (row for name, measure in measures.items() for row in measure.rows(name)))
    save(pnac_figure(measures), out / 'pnac.png')
    for name, measure, suffix in zip(names, measures.values(), suffixes(records), strict=True):
        save(pnac_layers_figure(name, measure), out / f'pnac_layers{suffix}.png')
        save(pnac_density_figure(name, measure), out / f'pnac_density{suffix}.png')
        for note in measure.notes():
            print(f'{name}: {note}')
    print(f'written: pnac.csv and figures in {out}')


if __name__ == '__main__':
    main()
