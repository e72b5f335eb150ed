"""Inference of Swin-T, T2T-ViT-14 and Mask R-CNN: LN, LN folded exactly, UN folded.

    python benchmarks/inference.py --device cuda --amp fp16 bf16 --batches 2 8 16 --seconds 120

The models run in rotation in each round, under autocast. A row is written as soon as it is measured, and no new
measurement starts after `--seconds`; the eager ones come first. `exact` is `fuse_norms` on the model with LayerNorms.
The rows are added to benchmarks/results/inference_DEVICE.jsonl.
"""
import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

from fuse_models import CONFIGS
from mmunorm.benchmark import measure
from mmunorm.benchmark.environment import environment, result_file
from mmunorm.benchmark.folding import Settings, prepare_models
from mmunorm.benchmark.models import LN, NORM_FREE, build_models, norm_name
from mmunorm.benchmark.tasks import task_of
from mmunorm.cli.arguments import command, device, load_config
from mmunorm.compat import allow_recompilations
from norm_layers import ROOT

import torch


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--configs', nargs='+', default=[f'configs/{name}.py' for name in CONFIGS])
    parser.add_argument('--batches', nargs='+', type=int, default=[2, 8, 16])
    parser.add_argument('--amp', nargs='+', choices=['none', 'fp16', 'bf16'], default=['fp16', 'bf16'])
    parser.add_argument('--modes', nargs='+', choices=['eager', 'compiled'], default=['eager', 'compiled'])
    parser.add_argument('--shape', type=int, nargs=2, help='height and width of the images')
    parser.add_argument('--device', type=device, default='cpu', help='e.g. cuda:0')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--seconds', type=float, default=600, help='no new measurement after so long')
    parser.add_argument('--out', default=ROOT / 'benchmarks/results', type=Path, help='folder of the results')
    return parser.parse_args(argv)


def measure_batch(models, plain, cfg, amp, mode, batch, args):
    """Rows of one batch size, without names."""
    where, task = torch.device(args.device), task_of(cfg)
    settings = Settings(batch_size=batch, device=args.device, amp=None if amp == 'none' else amp,
                        shape=tuple(args.shape or task.default_shape(cfg, where.type)), repeat=args.rounds)
    with torch.no_grad():
        timer, _ = prepare_models(models, plain, task, settings, where, [])
        if mode == 'compiled':
            for model in models.values():
                task.compile(model)
        timer.time(3 if mode == 'compiled' else 1)
        memory = {name: measure.peak_memory(run, where) for name, run in timer.runs.items()}
        seconds = timer.time(args.rounds)
    for name in models:
        yield dict(norm=name, images_per_second=batch / statistics.median(seconds[name]), peak_memory=memory[name],
                   to_ln=measure.ratio(seconds[name], seconds[LN]))


@command
def main(argv=None):
    args = parse_args(argv)
    start, path = time.monotonic(), result_file(args.out, 'inference', torch.device(args.device))
    path.parent.mkdir(parents=True, exist_ok=True)
    for config in args.configs:
        cfg = load_config(str(ROOT / config))
        plain = norm_name(cfg)
        models, _, _ = build_models(cfg)
        del models[NORM_FREE]
        allow_recompilations(64)
        for mode, amp, batch in itertools.product(args.modes, args.amp, args.batches):
            if time.monotonic() - start > args.seconds:
                print(f'not measured after {args.seconds:.0f} s: {Path(config).stem}, {mode}, {amp}, batch {batch}')
                continue
            for row in measure_batch(models, plain, cfg, amp, mode, batch, args):
                row = dict(model=Path(config).stem, mode=mode, amp=amp, batch=batch, **row,
                           environment=environment(torch.device(args.device)))
                with path.open('a') as file:
                    file.write(json.dumps(row) + '\n')
                print(f'{row["model"]}, {mode}, {amp}, batch {batch}, {row["norm"]}: '
                      f'{row["images_per_second"]:.4g} images/s', flush=True)
    print(f'Written: {path}')


if __name__ == '__main__':
    main()
