"""Draws the training curves of several runs on one picture."""
import argparse
from pathlib import Path

from mmunorm.analysis.comparison import METRICS
from mmunorm.analysis.curves import curves_figure, read_scalars
from mmunorm.engine import launch
from mmunorm.engine.preflight import PreflightError


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('log', nargs='+', help="work directories, or mmengine's scalars.json files")
    parser.add_argument('--keys', nargs='+', metavar='KEY',
                        help='scalars to draw; the loss and the usual metrics by default')
    parser.add_argument('--out', default='curves.png', help='picture to write (default curves.png)')
    return parser.parse_args(argv)


@launch.command
def main(argv=None):
    args = parse_args(argv)
    try:
        runs = {log: [read_scalars(log)] for log in args.log}
    except (FileNotFoundError, ValueError) as error:
        raise PreflightError(f'{error}.') from error
    found = dict.fromkeys(key for (scalars, ) in runs.values() for key in scalars)
    keys = args.keys or [key for key in ('loss', *METRICS) if key in found]
    unknown = [key for key in keys if key not in found]
    if unknown or not keys:
        raise PreflightError(f'--keys: no log has {", ".join(unknown) or "a loss"}; there are '
                             f'{", ".join(found)}.')
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    curves_figure({'training': runs}, keys).savefig(args.out, dpi=110)
    print(f'{args.out} shows {", ".join(keys)} of {len(runs)} runs.')


if __name__ == '__main__':
    main()
