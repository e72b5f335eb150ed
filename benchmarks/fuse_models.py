"""Compares folded models with LN, LN folded exactly, and no norm: Swin-T, T2T-ViT-14 and Mask R-CNN.

    python benchmarks/fuse_models.py

Each model runs eager and compiled, on a GPU also with AMP, measured as in tools/analysis/fuse_and_benchmark.py. The
results of each model are written to benchmarks/results/DEVICE.jsonl, one line per row of its table.
"""
import argparse
import json
import re
from pathlib import Path

from mmunorm.benchmark.folding import Settings, markdown, run_benchmark
from mmunorm.benchmark.measure import ratio
from mmunorm.cli.arguments import add_config_arguments, command, device, load_config

import torch
from mmengine.device import get_device

ROOT = Path(__file__).parent.parent
CONFIGS = ('swin_t_un_imagenet', 't2t_vit_14_un_imagenet', 'swin_t_un_maskrcnn_3x')
HEADER = ('model', 'mode', 'LN images/s', 'folded images/s', 'images/s exact/LN', 'images/s folded/LN',
          'quartiles of single rounds', 'memory folded/LN', 'time folded/norm-free')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--configs', nargs='+', default=[ROOT / f'configs/{name}.py' for name in CONFIGS],
                        help='config files (default: the three models)')
    modes = ['eager', 'compiled']
    parser.add_argument('--modes', nargs='+', choices=modes, default=modes)
    parser.add_argument('--amp', nargs='+', choices=['none', 'fp16', 'bf16'],
                        help='precisions (default: float32, on a GPU also fp16)')
    parser.add_argument('--preset', choices=['paper'], help='batch 512 at 224 x 224; 2 at 1333 x 800')
    parser.add_argument('--device', type=device, default=get_device(), help='e.g. cpu or cuda:0')
    parser.add_argument('--batch-size', type=int)
    parser.add_argument('--shape', type=int, nargs=2)
    parser.add_argument('--repeat', type=int)
    parser.add_argument('--out', default=ROOT / 'benchmarks/results', type=Path, help='folder of the results')
    add_config_arguments(parser, norm=False)
    args = parser.parse_args(argv)
    args.amp = args.amp or (['none'] if torch.device(args.device).type == 'cpu' else ['none', 'fp16'])
    return args


def lines_of(result, name, mode):
    """The rows of a result as lines of the data file, without the time of each batch."""
    for row in result['rows']:
        measured = {key: value for key, value in row.items() if key != 'seconds'}
        yield dict(model=name, mode=mode, **measured, settings=result['settings'],
                   environment=result['environment'])


def summary(result, name, mode):
    """One line of the table: folded compared with LN, and with norm-free in the same rounds."""
    ln, exact, _, folded, free = result['rows']
    beside_free = ratio(folded['seconds'], free['seconds'])['value']
    to_ln = folded['to_ln']
    speed = to_ln['throughput']
    return [name, mode, f'{ln["throughput"]["median"]:.4g}', f'{folded["throughput"]["median"]:.4g}',
            f'{exact["to_ln"]["throughput"]["value"]:.3f}', f'{speed["value"]:.3f}',
            f'{speed["low"]:.3f} to {speed["high"]:.3f}', f'{to_ln["peak_memory"]:.3f}', f'{beside_free:.3f}']


def result_file(folder, device):
    """The data file of a device, by its name."""
    return folder / f'{re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")}.jsonl'


def write_lines(path, lines):
    """Adds lines to a data file, replacing lines of the same model, mode, batch and shape."""
    def key(line):
        return line['model'], line['mode'], line['settings']['batch_size'], tuple(line['settings']['shape'])

    new = set(map(key, lines))
    old = map(json.loads, path.read_text().splitlines()) if path.is_file() else ()
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [line for line in old if key(line) not in new]
    path.write_text(''.join(json.dumps(line) + '\n' for line in [*kept, *lines]))


@command
def main(argv=None):
    args = parse_args(argv)
    table, path = [], None
    for config in map(Path, args.configs):
        for amp in args.amp:
            for mode in args.modes:
                cfg = load_config(str(config), args.cfg_options)
                chosen = dict(
                    batch_size=args.batch_size, shape=args.shape, device=args.device, repeat=args.repeat,
                    amp=None if amp == 'none' else amp, compile=mode == 'compiled')
                settings = Settings.of_the_paper(cfg, **chosen) if args.preset else Settings(**chosen)
                title = f'{config.stem}, {mode}, {"float32" if amp == "none" else amp}'
                result = run_benchmark(cfg, settings, title=title)
                print(markdown(result), flush=True)
                label = title.partition(', ')[2]
                table.append(summary(result, config.stem, label))
                path = result_file(args.out, result['environment']['device'])
                write_lines(path, list(lines_of(result, config.stem, label)))
    print('\n'.join(f'| {" | ".join(cells)} |' for cells in (HEADER, ['---'] * len(HEADER), *table)))
    print(f'written: {path}')


if __name__ == '__main__':
    main()
