"""Averages checkpoints of a run, such as its last five, for testing, folding and export."""
import argparse

from mmunorm.checkpoints.layouts import find_weights
from mmunorm.checkpoints.loading import read_checkpoint
from mmunorm.cli.arguments import add_trust_argument, command, out_file
from mmunorm.utils import PreflightError, whole_file

from mmengine.runner.checkpoint import save_checkpoint
from tqdm import tqdm


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=f'{__doc__} Weights and running statistics are averaged; counts are those of the last checkpoint.')
    parser.add_argument('checkpoint', nargs='+', help='checkpoints of one model, in the order of their steps')
    parser.add_argument('--out', required=True, metavar='FILE', help='checkpoint to write')
    add_trust_argument(parser)
    args = parser.parse_args(argv)
    if len(args.checkpoint) < 2:
        parser.error('an average takes at least two checkpoints')
    return args


def average(paths):
    """The mean of the checkpoints' weights, and the `meta` of the last."""
    sums, shapes = {}, None
    for path in tqdm(paths, desc='reading', unit='checkpoint', disable=None):
        content = read_checkpoint(path)
        state = find_weights(content)
        own_shapes = {name: value.shape for name, value in state.items()}
        shapes = shapes or own_shapes
        if own_shapes != shapes:
            name = next(name for name in sorted({*own_shapes, *shapes}) if own_shapes.get(name) != shapes.get(name))
            raise PreflightError(f'{path} belongs to another model than {paths[0]}: {name} differs.')
        for name, value in state.items():
            if value.is_floating_point():
                sums[name] = sums.get(name, 0) + value.double()
    means = {name: (sums[name] / len(paths)).to(value.dtype) if name in sums else value
             for name, value in state.items()}
    return means, content.get('meta', {})


@command
def main(argv=None):
    args = parse_args(argv)
    out_file(args.out, '--out', *args.checkpoint)
    state, meta = average(args.checkpoint)
    with whole_file(args.out) as part:
        save_checkpoint(dict(meta=meta, state_dict=state), str(part))
    print(f'{args.out}: the mean of {len(args.checkpoint)} checkpoints')


if __name__ == '__main__':
    main()
