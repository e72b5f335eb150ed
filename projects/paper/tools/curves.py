"""Draws training curves of several runs in one figure, curves.png (Fig. 1), and writes their numbers to curves.csv."""
import argparse

from mmunorm.cli.arguments import command, out_folder
from mmunorm.utils import PreflightError, plural
from projects.paper.paper.curves import METRICS, curves_figure, read_scalars
from projects.paper.paper.layout import save
from projects.paper.paper.measures import write_csv
from projects.paper.paper.work_dirs import check_unique, distinct_names


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('log', nargs='+', help="work directories, or mmengine's scalars.json files")
    parser.add_argument('--keys', nargs='+', metavar='KEY',
                        help='scalars to draw (default: the loss and the usual metrics)')
    parser.add_argument('--out', required=True, help='folder for the image and the numbers')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    logs = [read_scalars(log) for log in args.log]
    for path, scalars in zip(args.log, logs, strict=True):
        if not scalars:
            raise PreflightError(f'there is no mmengine log (TIME/vis_data/scalars.json) with a line in {path}.')
    check_unique(args.log)
    runs = dict(zip(distinct_names(args.log), logs, strict=True))
    found = dict.fromkeys(key for scalars in logs for key in scalars)
    keys = args.keys or [key for key in ('loss', *METRICS) if key in found]
    unknown = [key for key in keys if key not in found]
    if unknown or not keys:
        raise PreflightError(f'--keys: no log has {", ".join(unknown) or "a loss"}; there are '
                             f'{", ".join(found)}.')
    out = out_folder(args.out)
    write_csv(out / 'curves.csv', ('run', 'scalar', 'step', 'value'),
              ((name, key, int(step), value) for name, scalars in runs.items() for key in keys
               for step, value in scalars.get(key, ())))
    save(curves_figure({'': {name: [scalars] for name, scalars in runs.items()}}, keys, 'Training curves'),
         out / 'curves.png')
    print(f'written: curves.csv and curves.png in {out}: {", ".join(keys)} of {plural(len(runs), "run")}.')


if __name__ == '__main__':
    main()
