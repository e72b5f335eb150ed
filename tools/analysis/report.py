"""One or several runs as one HTML page that opens from disk: settings and metrics, training curves, PNAC,
single channels, outlier steps, and CKA where it is given."""
import argparse

from mmunorm.analysis import commands
from mmunorm.analysis.report import build_report, read_cka, read_runs
from mmunorm.engine import launch


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('work_dir', nargs='+', help='work directories of training runs')
    parser.add_argument('--out', required=True, help='folder for report.html')
    parser.add_argument('--cka', nargs='+', default=[], metavar='PATH',
                        help='output folders of tools/analysis/cka.py, or their cka.json')
    parser.add_argument('--span', type=int, help='recorded steps of a span for PNAC; 100 by default')
    return parser.parse_args(argv)


@launch.command
@commands.clear_record_errors
def main(argv=None):
    args = parse_args(argv)
    page = build_report(read_runs(args.work_dir), [read_cka(path) for path in args.cka], args.span,
                        progress=True)
    path = commands.out_folder(args.out) / 'report.html'
    path.write_text(page, encoding='utf-8')
    print(f'{path} ({path.stat().st_size / 1e6:.1f} MB) shows {len(args.work_dir)} runs.')


if __name__ == '__main__':
    main()
