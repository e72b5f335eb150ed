"""Draws statistics of single channels over training with their geometric and arithmetic means (Fig. 4), and
writes channels.csv. Without --layers, it takes layers over the whole depth. Without --channels, it takes the
channel with the highest peak in each layer. Without --steps, it shows 100 steps around the peak."""
import argparse

from mmunorm.cli.arguments import command, out_folder
from projects.paper.paper import RecordError
from projects.paper.paper.figures import statistics_figure
from projects.paper.paper.layout import save
from projects.paper.paper.measures import FIELDS, around_peak, channel_history, evenly_spaced, peak_channel, write_csv
from projects.paper.paper.records import add_record_arguments, read_records


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_record_arguments(parser)
    parser.add_argument('--layers', nargs='+', metavar='NAME', help='names of layers (default: 3 over the depth)')
    parser.add_argument('--channels', nargs='+', type=int, metavar='N',
                        help='a channel for each of --layers, or one for all')
    parser.add_argument('--steps', nargs=2, type=int, metavar=('FIRST', 'LAST'),
                        help='training steps to show (default: 100 recorded steps around each peak)')
    parser.add_argument('--window', type=int, default=4, help='M, the number of steps in the means (default 4)')
    args = parser.parse_args(argv)
    if args.channels and len(args.channels) not in (1, len(args.layers or ())):
        parser.error('--channels takes one number, or as many as --layers has names')
    return args


@command
def main(argv=None):
    args = parse_args(argv)
    (record, ), (name, ) = read_records([args.record])
    layers = args.layers or evenly_spaced(record.layers, 3)
    channels = args.channels or [peak_channel(record, layer) for layer in layers]
    channels = channels * len(layers) if len(channels) == 1 else channels
    histories = []
    for layer, channel in zip(layers, channels, strict=True):
        rows = around_peak(record, layer, channel)
        if args.steps:
            rows = slice(*record.steps.searchsorted([args.steps[0], args.steps[1] + 1]))
            if not len(record.steps[rows]):
                raise RecordError(f'--steps: no recorded step is from {args.steps[0]} to {args.steps[1]}.')
        histories += [channel_history(record, layer, channel, field, args.window, rows) for field in FIELDS]
    out = out_folder(args.out)
    write_csv(out / 'channels.csv', ('run', 'layer', 'channel', 'statistic', 'step', 'value', 'gm', 'am'),
              ((name, history.layer, history.channel, history.field, *values) for history in histories
               for values in zip(history.steps, history.values, history.gm, history.am, strict=True)))
    save(statistics_figure(name, histories, args.window), out / 'channels.png')
    print(f'written: channels.csv and channels.png in {out}')


if __name__ == '__main__':
    main()
