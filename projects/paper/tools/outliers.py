"""Draws the accumulated outlier steps of each layer at several points of training (Fig. 5), and writes outliers.csv."""
import argparse

from mmunorm.cli.arguments import command, out_folder, positive
from projects.paper.paper.figures import outliers_figure
from projects.paper.paper.layout import save
from projects.paper.paper.measures import accumulated_outliers, write_csv
from projects.paper.paper.records import add_record_arguments, read_records


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_record_arguments(parser)
    parser.add_argument('--points', type=positive, default=4, help='number of points of training (default 4)')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    (record, ), (name, ) = read_records([args.record])
    layers, steps, counts = accumulated_outliers(record, args.points)
    out = out_folder(args.out)
    write_csv(out / 'outliers.csv', ('run', 'layer', 'step', 'outlier_steps'),
              ((name, layer, step, count) for step, row in zip(steps, counts, strict=True)
               for layer, count in zip(layers, row, strict=True)))
    save(outliers_figure(name, layers, steps, counts), out / 'outliers.png')
    print(f'written: outliers.csv and outliers.png in {out}')


if __name__ == '__main__':
    main()
