"""Writes a report of one or several runs: report.html, one HTML page that opens from disk. It shows settings and
metrics, training curves, PNAC, single channels, outlier steps, and CKA if --cka is given. The numbers are in
report.json."""
import argparse
import json

from mmunorm.cli.arguments import command, out_folder
from mmunorm.utils import plural, write_text
from projects.paper.paper.page import build_report, read_cka
from projects.paper.paper.work_dirs import measure_work_dir, read_work_dirs, report_numbers


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('work_dir', nargs='+', help='work directories of training runs')
    parser.add_argument('--out', required=True, help='folder for report.html and report.json')
    parser.add_argument('--cka', nargs='+', default=[], metavar='PATH',
                        help='output folders of projects/paper/tools/cka.py, or their cka.json')
    parser.add_argument('--span', type=int,
                        help='recorded steps of a span for PNAC (default: 100, or all if there are fewer)')
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    runs, cka = read_work_dirs(args.work_dir), read_cka(args.cka)
    measured = [measure_work_dir(run, args.span) for run in runs]
    out = out_folder(args.out)
    path = out / 'report.html'
    write_text(path, build_report(measured, cka))
    write_text(out / 'report.json', json.dumps(report_numbers(measured, cka), allow_nan=False))
    print(f'{path} ({path.stat().st_size / 1e6:.1f} MB) shows {plural(len(runs), "run")}; their numbers are in '
          f'{out / "report.json"}.')


if __name__ == '__main__':
    main()
