"""Compares the training step of single norm layers with LayerNorm's: time and peak memory, eager and compiled.

    python benchmarks/norm_layers.py
    python benchmarks/norm_layers.py --device cuda --batch 128 --dtypes float32 float16 bfloat16

Every norm runs forward and backward on the four token maps of Swin-T, all norms in rotation in each round. Ratios are
medians over rounds, with their quartiles. `UN` is past its warm-up, `UN in warm-up` is not. BatchNorm is
torch's, with tokens as samples. The rows are written to benchmarks/results/norm_layers_DEVICE.jsonl.
"""
import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

from mmunorm.benchmark import measure
from mmunorm.benchmark.environment import environment, result_file
from mmunorm.cli.arguments import device, threads
from mmunorm.norms import MABN, PN, RMSN, UN, DyT, TokenBN
from mmunorm.norms.layers import ONLINE_NORMS

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
SHAPES = ((3136, 96), (784, 192), (196, 384), (49, 768))
LN = 'LayerNorm'


class TokensBN(nn.BatchNorm1d):
    """torch's BatchNorm with tokens as samples."""

    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view_as(x)


NORMS = {
    LN: nn.LayerNorm,
    'UN': partial(UN, warmup_iters=0),
    'UN in warm-up': partial(UN, warmup_iters=10**9),
    'TokenBN': TokenBN,
    'BatchNorm': TokensBN,
    **({'RMSNorm': nn.RMSNorm} if hasattr(nn, 'RMSNorm') else {}),  # not before torch 2.4
    'MABN': partial(MABN, warmup_iters=0),
    'PN': partial(PN, warmup_iters=0),
    'RMSN': RMSN,
    'DyT': DyT,
}
DEFAULT_NORMS = tuple(name for name in NORMS if name not in ('MABN', 'PN', 'RMSN', 'DyT'))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--norms', nargs='+', choices=NORMS, default=DEFAULT_NORMS,
                        help='norms to compare with LayerNorm')
    parser.add_argument('--modes', nargs='+', choices=['eager', 'compiled'], default=['eager', 'compiled'])
    parser.add_argument('--dtypes', nargs='+', choices=['float32', 'bfloat16', 'float16'],
                        default=['float32'],
                        help="dtypes of the activations; parameters are float32, as under autocast")
    parser.add_argument('--device', type=device, default='cpu', help='e.g. cuda:0')
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--rounds', type=int, default=40)
    parser.add_argument('--threads', type=threads, help='threads of a CPU')
    parser.add_argument('--clock', choices=['wall', 'cpu'], default='wall',
                        help='cpu counts the time of this process on all its threads. Use it with --threads 1 '
                        'on a CPU that others use too')
    parser.add_argument('--out', default=ROOT / 'benchmarks/results', type=Path, help='folder of the results')
    args = parser.parse_args(argv)
    if args.clock == 'cpu' and torch.device(args.device).type != 'cpu':
        parser.error('--clock cpu does not measure a GPU')
    if args.batch < 1 or args.rounds < 1:
        parser.error(f'--batch and --rounds must be positive, got {args.batch} and {args.rounds}')
    return args


def make_step(name, channels, x, dy, compiled):
    """A function without arguments that runs forward and backward once."""
    norm = NORMS[name](channels).to(x.device)
    if isinstance(norm, ONLINE_NORMS):  # they need parameters of the input's dtype
        norm.to(x.dtype)
    parameters = list(norm.parameters())
    run = torch.compile(norm, fullgraph=True, dynamic=False) if compiled else norm

    def step():
        torch.autograd.grad(run(x), [x, *parameters], dy)

    for _ in range(8):  # compiles, allocates, and fills UN's window
        step()
    return step


def steps_per_round(step, device):
    """The number of steps that take a few milliseconds."""
    timer = measure.InterleavedTimer({'': step}, device)
    seconds = min(timer.seconds('') for _ in range(5))
    return max(1, round(5e-3 / seconds))


def repeat(step, times):
    def run_steps():
        for _ in range(times):
            step()
    return run_steps


def measure_norms(names, shape, dtype, device, mode, args):
    """Yields one row for each norm."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    x.requires_grad_()
    torch._dynamo.reset()
    steps = {name: make_step(name, shape[-1], x, dy, mode == 'compiled') for name in names}
    memory = {name: measure.peak_memory(step, device) for name, step in steps.items()}
    times = steps_per_round(steps[LN], device)
    clock = time.process_time if args.clock == 'cpu' else time.perf_counter
    timer = measure.InterleavedTimer({name: repeat(step, times) for name, step in steps.items()}, device, clock)
    seconds = timer.time(args.rounds)
    for name in names:
        yield dict(
            norm=name, shape=list(shape), dtype=str(dtype).removeprefix('torch.'), mode=mode,
            seconds=statistics.median(seconds[name]) / times,
            to_ln=measure.ratio(seconds[name], seconds[LN]), peak_memory=memory[name],
            peak_memory_to_ln=memory[name] / memory[LN], clock=args.clock, rounds=args.rounds)


def main(argv=None):
    args = parse_args(argv)
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    names = list(dict.fromkeys([LN, *args.norms]))
    path = result_file(args.out, 'norm_layers', device)
    rows = []
    print('| shape | dtype | mode | LN ms | ' + ' | '.join(f'{name} / LN' for name in names[1:]) + ' |')
    print('|---' * (3 + len(names)) + '|')
    for dtype in args.dtypes:
        for mode in args.modes:
            for tokens, channels in SHAPES:
                shape = (args.batch, tokens, channels)
                new = list(measure_norms(names, shape, getattr(torch, dtype), device, mode, args))
                cells = [f'{row["to_ln"]["value"]:.2f} ({row["peak_memory_to_ln"]:.2f})' for row in new[1:]]
                print(f'| {shape} | {dtype} | {mode} | {new[0]["seconds"] * 1e3:.3f} | '
                      + ' | '.join(cells) + ' |', flush=True)
                rows += [dict(row, environment=environment(device)) for row in new]
                path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    print(f'Time (peak memory) as multiples of LayerNorm\'s. Written: {path}')


if __name__ == '__main__':
    main()
