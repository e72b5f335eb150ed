"""Exports a trained model, its norms folded, to one file that a runtime loads."""
import argparse
import time
from pathlib import Path

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
from mmunorm.cli.arguments import add_config_arguments, command, load_config, out_folder, warn
from mmunorm.config.checkpoints import read_checkpoint
from mmunorm.config.models import load_model
from mmunorm.deploy.export import describe_model, save, trace
from mmunorm.deploy.formats import find_format, table
from mmunorm.fusion import fuse_norms


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f'must be at least 1, got {value}')
    return value


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, epilog=f'formats:\n\n{table()}',
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--format', required=True, help='what to make; see the table below')
    parser.add_argument('--half', action='store_true', help='weights in float16')
    parser.add_argument('--batch', type=positive, default=1, help='pictures at once (default: 1)')
    parser.add_argument('--shape', type=positive, nargs=2, metavar=('H', 'W'),
                        help='height and width of the input (default: what the test pipeline makes; for a detector a '
                        'square, for pictures that lie and pictures that stand)')
    parser.add_argument('--out', help='file to write (default: the checkpoint, with the suffix of the format)')
    add_config_arguments(parser)
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    chosen = find_format(args.format, tuple(flag for flag in ('half', ) if getattr(args, flag)))
    cfg = load_config(args.config, args.cfg_options, args.norm)
    out = Path(args.out or args.checkpoint).with_suffix(chosen.suffix)
    out_folder(out.parent)
    model = load_model(cfg, args.checkpoint)
    report = fuse_norms(model)
    for fold in report.kept:
        warn(f'{fold.norm} ({fold.kind}) stays: {fold.where}')
    checkpoint_meta = read_checkpoint(args.checkpoint).get('meta', {})
    meta = describe_model(model, cfg, checkpoint_meta, args.shape)
    start = time.perf_counter()
    made = save(trace(model, meta, args.batch), chosen, out, args.half)
    print(f'written: {made.path}, {made.size / 1e6:.1f} MB, in {time.perf_counter() - start:.0f} s')
    print(f'norms left: {made.norms}')
    print('largest difference to torch: ' + ', '.join(f'{kind} {value:.2g}' for kind, value in made.difference.items()))
    print(f'use it: python tools/deploy/infer.py {made.path} PICTURES --out-dir DIR')
    return made


if __name__ == '__main__':
    main()
