"""Measures IAT with LayerNorm and with UN, folded and not, at the sizes of LOL and of a detector; random weights.

    python projects/low_light/tools/benchmark.py
    python projects/low_light/tools/benchmark.py --device cuda --threads 8

With LayerNorm, the light norms and BatchNorms are folded. The four models run in rotation in each round. Ratios are
medians over rounds, with their quartiles. Prints a table and writes the rows to
benchmarks/results/low_light_speed_DEVICE.jsonl.
"""
import argparse
import copy
import json
import statistics
from pathlib import Path

from mmunorm import fuse_norms
from mmunorm.benchmark import measure
from mmunorm.benchmark.environment import environment, result_file
from mmunorm.cli.arguments import command, device, positive, threads
from projects.low_light.low_light import IAT

import torch

ROOT = Path(__file__).parents[3]
SIZES = ((400, 600), (800, 1333))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', type=positive, nargs='+', default=[side for size in SIZES for side in size],
                        metavar='SIDE', help='height and width, in turn (default: 400 600 800 1333)')
    parser.add_argument('--device', type=device, default='cpu', help='e.g. cuda:0')
    parser.add_argument('--rounds', type=positive, default=15)
    parser.add_argument('--threads', type=threads, help='threads of a CPU')
    parser.add_argument('--out', default=ROOT / 'benchmarks/results', type=Path, help='folder of the results')
    args = parser.parse_args(argv)
    if len(args.sizes) % 2:
        parser.error(f'--sizes takes pairs of height and width, got {len(args.sizes)} numbers')
    return args


def build(device):
    """The four models, by name."""
    models = {}
    for norm in ('LN', 'UN'):
        models[norm] = IAT(dict(type=norm)).eval().to(device)
        models[f'{norm}, folded'] = copy.deepcopy(models[norm])
        fuse_norms(models[f'{norm}, folded'], strict=norm == 'UN', layer_norms='keep')
    return models


@command
@torch.no_grad()
def main(argv=None):
    args = parse_args(argv)
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    models, rows = build(device), []
    path = result_file(args.out, 'low_light_speed', device)
    print('| image | LN, ms | LN, folded / LN | UN / LN | UN, folded / LN |\n|---|---|---|---|---|')
    for height, width in zip(args.sizes[::2], args.sizes[1::2], strict=True):
        x = torch.rand(1, 3, height, width, device=device)
        timer = measure.InterleavedTimer(
            {name: lambda model=model, x=x: model(x) for name, model in models.items()}, device)
        timer.time(2)
        seconds = timer.time(args.rounds)
        new = [dict(norm=name, shape=[1, 3, height, width], seconds=statistics.median(seconds[name]),
                    to_ln=measure.ratio(seconds[name], seconds['LN']), threads=torch.get_num_threads(),
                    rounds=args.rounds, environment=environment(device)) for name in models]
        ratios = ' | '.join('{value:.2f}'.format(**row['to_ln']) for row in new[1:])
        print(f'| {height} x {width} | {new[0]["seconds"] * 1e3:.1f} | {ratios} |', flush=True)
        rows += new
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    print(f'written: {path}')


if __name__ == '__main__':
    main()
