"""Compares a training step of Swin-T with UN and with LN: forward, backward, fused AdamW; time and peak memory.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --config projects/digits/configs/swin_un_classifier.py --batch 64 --size 32
    python benchmarks/train_step.py --device cuda --batch 128 --amp none bf16 --modes eager compiled

Both models run in rotation in each round. Ratios are medians over rounds. `UN` is past its warm-up. In eager mode on a
GPU, a third one is UN without Triton. The rows are written to benchmarks/results/train_step_DEVICE.jsonl.
"""
import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from unittest import mock

from mmunorm.backbones import UNSwinTransformer
from mmunorm.benchmark import measure
from mmunorm.benchmark.environment import environment, result_file
from mmunorm.benchmark.folding import precision
from mmunorm.cli.arguments import device, threads
from mmunorm.norms import kernels
from norm_layers import ROOT

import torch
from mmengine.config import Config
from mmengine.registry import MODELS

UN = dict(type='UN', warmup_iters=0)
NORMS = dict(LN=dict(type='LN'), UN=UN)
WITHOUT_TRITON = 'UN without Triton'


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', default='tiny', choices=UNSwinTransformer.arch_zoo,
                        help="mmpretrain's name of a Swin")
    parser.add_argument('--config', help='a config whose backbone is trained in place of `--arch`')
    parser.add_argument('--modes', nargs='+', choices=['eager', 'compiled'], default=['eager'])
    parser.add_argument('--size', type=int, default=224, help='side of the images in pixels')
    parser.add_argument('--amp', nargs='+', choices=['none', 'fp16', 'bf16'], default=['none'],
                        help='autocast; no gradient scaler')
    add_step_arguments(parser)
    return parser.parse_args(argv)


def add_step_arguments(parser):
    """Adds the arguments of all benchmarks of training steps."""
    parser.add_argument('--device', type=device, default='cpu', help='e.g. cuda:0')
    parser.add_argument('--batch', type=int, default=4)
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=threads, help='threads of a CPU')
    parser.add_argument('--clock', choices=['wall', 'cpu'], default='wall',
                        help='cpu counts the time of this process. Use it with --threads 1 on a CPU that others '
                        'use too')
    parser.add_argument('--out', default=ROOT / 'benchmarks/results', type=Path, help='folder of the results')


def make_step(norm_cfg, images, mode, amp, args):
    """A function without arguments that runs one training step."""
    torch.manual_seed(0)
    if args.config:
        model = MODELS.build({**Config.fromfile(args.config).model.backbone, 'norm_cfg': norm_cfg})
    else:
        model = UNSwinTransformer(
            args.arch, img_size=args.size, norm_cfg=norm_cfg, drop_path_rate=0.0, pad_small_map=True)
    model.to(images.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model, dynamic=False) if mode == 'compiled' else model

    def loss():
        with precision(images.device, amp):
            return run(images)[-1].float().square().mean()

    return warm_step(loss, optimizer)


def without_triton(step):
    """The same step with the norms in plain torch; what ran before has no influence on it."""
    def plain():
        with mock.patch.object(kernels, 'triton_kernels', lambda: None):
            step()

    return plain


def warm_step(loss, optimizer):
    """A function that runs one training step on `loss()`, after six steps that compile it and fill UN's window."""

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(6):
        step()
    return step


def main(argv=None):
    args = parse_args(argv)
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    images = torch.randn(args.batch, 3, args.size, args.size,
                         generator=torch.Generator().manual_seed(0)).to(device)
    path = result_file(args.out, 'train_step', device)
    rows = []
    for name, mode in itertools.product(args.amp, args.modes):
        amp = None if name == 'none' else name
        torch._dynamo.reset()
        steps = {name: make_step(cfg, images, mode, amp, args) for name, cfg in NORMS.items()}
        if device.type == 'cuda' and mode == 'eager':
            steps[WITHOUT_TRITON] = without_triton(make_step(UN, images, mode, amp, args))
        memory = {name: measure.peak_memory(step, device) for name, step in steps.items()}
        clock = time.process_time if args.clock == 'cpu' else time.perf_counter
        seconds = measure.InterleavedTimer(steps, device, clock).time(args.rounds)
        for name in steps:
            rows.append(dict(
                norm=name, arch=args.config or args.arch, batch=args.batch, size=args.size, amp=amp, mode=mode,
                seconds=statistics.median(seconds[name]), to_ln=measure.ratio(seconds[name], seconds['LN']),
                peak_memory=memory[name],
                peak_memory_to_ln=memory[name] / memory['LN'], clock=args.clock, rounds=args.rounds,
                environment=environment(device)))
            to_ln = rows[-1]['to_ln']
            print(f'{mode}, {amp or "float32"}, {name}: {rows[-1]["seconds"] * 1e3:.1f} ms, '
                  f'{to_ln["value"]:.3f} x LN ({to_ln["low"]:.3f} to {to_ln["high"]:.3f}), peak memory '
                  f'{rows[-1]["peak_memory_to_ln"]:.3f} x LN', flush=True)
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    print(f'Written: {path}')


if __name__ == '__main__':
    main()
