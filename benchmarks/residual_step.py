"""Compares a training step with residual schemes of ViTs: forward, backward, fused AdamW.

    python benchmarks/residual_step.py --threads 1 --clock cpu

All schemes run in rotation in each round. Ratios to PostNorm's are medians over rounds. BranchNorm is in its ramp. The
rows are written to benchmarks/results/residual_step_DEVICE.jsonl.
"""
import argparse
import json
import statistics
import time

from mmunorm.benchmark import measure
from mmunorm.benchmark.environment import environment, result_file
from projects.deep.deep import UNVisionTransformer
from projects.deep.deep.residuals import count_updates
from train_step import add_step_arguments, warm_step

import torch

SCHEMES = dict(PostNorm={}, DeepNorm={}, BranchNorm=dict(warmup_iters=10**6), PreNorm={})
NORMS = dict(LN=dict(type='LN', eps=1e-6), UN=dict(type='UN', warmup_iters=0))
MODELS = {
    'DeiT-S': dict(arch='deit-small', img_size=224),
    'DeiT-S, 48 layers': dict(
        arch=dict(embed_dims=384, num_layers=48, num_heads=6, feedforward_channels=1536), img_size=224),
    'digits, 48 layers': dict(
        arch=dict(embed_dims=64, num_layers=48, num_heads=4, feedforward_channels=256), img_size=32, patch_size=8),
}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS), metavar='MODEL',
                        help=f'default: all of {"; ".join(MODELS)}')
    parser.add_argument('--norms', nargs='+', choices=NORMS, default=list(NORMS))
    add_step_arguments(parser)
    return parser.parse_args(argv)


def make_step(scheme, norm, settings, args):
    """A function without arguments that runs one training step."""
    torch.manual_seed(0)
    model = UNVisionTransformer(
        **settings, norm_cfg=NORMS[norm], residual_cfg=dict(SCHEMES[scheme], type=scheme)).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    count_updates(model, optimizer)
    images = torch.randn(args.batch, 3, settings['img_size'], settings['img_size'], device=args.device)
    return warm_step(lambda: model(images)[-1].square().mean(), optimizer)


def main(argv=None):
    args = parse_args(argv)
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    clock = time.process_time if args.clock == 'cpu' else time.perf_counter
    path = result_file(args.out, 'residual_step', device)
    rows = []
    for name in args.models:
        for norm in args.norms:
            steps = {scheme: make_step(scheme, norm, MODELS[name], args) for scheme in SCHEMES}
            seconds = measure.InterleavedTimer(steps, device, clock).time(args.rounds)
            for scheme in SCHEMES:
                ratio = measure.ratio(seconds[scheme], seconds['PostNorm'])
                rows.append(dict(
                    model=name, norm=norm, scheme=scheme, batch=args.batch,
                    seconds=statistics.median(seconds[scheme]), to_post_norm=ratio, clock=args.clock,
                    rounds=args.rounds, environment=environment(device)))
                print(f'{name}, {norm}, {scheme}: {rows[-1]["seconds"] * 1e3:.1f} ms, {ratio["value"]:.3f} x PostNorm '
                      f'({ratio["low"]:.3f} to {ratio["high"]:.3f})', flush=True)
            path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    print(f'Written: {path}')


if __name__ == '__main__':
    main()
