"""The overhead of a norm layer: forward and backward of 8 tokens of 16 channels, and calls of ATen.

    python benchmarks/tiny_layer.py

Time of the process, one thread, all norms in rotation in each round. Calls are those that torch's profiler sees, also
of operators inside of operators. The rows are written to benchmarks/results/tiny_layer_DEVICE.jsonl.
"""
import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

from mmunorm.benchmark import measure
from mmunorm.benchmark.environment import environment, result_file
from norm_layers import LN, NORMS, ROOT, repeat

import torch
from torch.profiler import ProfilerActivity, profile

TOKENS, CHANNELS, STEPS = 8, 16, 20
MEASURED = (LN, 'BatchNorm', 'UN', 'UN in warm-up')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=200)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--out', default=ROOT / 'benchmarks/results', type=Path, help='folder of the results')
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    x, dy = torch.randn(2, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    steps, calls, device = {}, {}, torch.device('cpu')
    for name in MEASURED:
        norm = NORMS[name](CHANNELS)
        steps[name] = partial(lambda norm, inputs: torch.autograd.grad(norm(x), inputs, dy), norm,
                              [x, *norm.parameters()])
        repeat(steps[name], 20)()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            steps[name]()
        calls[name] = sum(event.count for event in profiler.key_averages() if event.key.startswith('aten::'))
    timer = measure.InterleavedTimer({name: repeat(step, STEPS) for name, step in steps.items()}, device,
                                     time.process_time)
    timer.time(2)
    seconds = timer.time(args.rounds)
    path = result_file(args.out, 'tiny_layer', device)
    rows = [dict(norm=name, tokens=TOKENS, channels=CHANNELS, calls=calls[name], rounds=args.rounds,
                 seconds=statistics.median(seconds[name]) / STEPS, least=min(seconds[name]) / STEPS,
                 to_ln=measure.ratio(seconds[name], seconds[LN]), environment=environment(device)) for name in MEASURED]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    for row in rows:
        print(f'{row["norm"]}: {row["seconds"] * 1e6:.0f} us (least {row["least"] * 1e6:.0f}), {row["calls"]} calls, '
              f'{row["to_ln"]["value"]:.2f} x LN')
    print(f'Written: {path}')


if __name__ == '__main__':
    main()
