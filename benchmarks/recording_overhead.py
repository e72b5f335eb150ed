"""Measures the overhead of NormStatisticsHook at interval 1: training steps with and without it, alternating.

    python benchmarks/recording_overhead.py [--steps 30] [--only digits]

Prints a Markdown table. The last column is the extra time of a step with the hook, including the time to write the
file, relative to a step without it. Step times are medians.
"""
import argparse
import statistics
import tempfile
import time
from types import SimpleNamespace

from mmunorm.cli.arguments import device
from projects.paper.paper import NormStatisticsHook

import numpy as np
import torch
from mmengine.device import get_device
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from tqdm import tqdm

DIGITS = dict(arch=dict(embed_dims=48, depths=[2, 2, 2, 2], num_heads=[2, 4, 8, 16]), img_size=32,
              patch_size=4, window_size=4, pad_small_map=True)
SWIN_T = dict(arch='tiny', img_size=224, drop_path_rate=0.2)


def build(arguments, norm, classes, channels):
    return MODELS.build(dict(
        type='mmpretrain.ImageClassifier',
        backbone=dict(type='UNSwinTransformer', norm_cfg=norm, **arguments),
        neck=dict(type='mmpretrain.GlobalAveragePooling'),
        head=dict(type='mmpretrain.LinearClsHead', num_classes=classes, in_channels=channels),
        data_preprocessor=dict(type='mmpretrain.ClsDataPreprocessor')))


def measure(model, batch, size, steps, device):
    """Median seconds of a step without and with the hook, seconds to write a step, and bytes of a step."""
    model = model.to(device).train()
    optimizer = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-4))
    images = torch.randn(batch, 3, size, size, device=device)
    samples = _samples(batch, device)
    times = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        hook = NormStatisticsHook()
        runner = SimpleNamespace(model=model, work_dir=folder, cfg=SimpleNamespace(), iter=0,
                                 optim_wrapper=optimizer, message_hub=MessageHub.get_instance('overhead'))

        def step(recorded):
            if recorded:
                hook.before_train_iter(runner, runner.iter)
            losses = model(images, samples, mode='loss')
            optimizer.update_params(losses['loss'])
            if recorded:
                hook.after_train_iter(runner, runner.iter)
            runner.iter += 1

        hook.before_train(runner)
        taps = hook._taps
        for round_ in tqdm(range(-2, steps), desc='steps', leave=False):
            for recorded in (False, True):
                for tap in taps:
                    tap.attach() if recorded else tap.remove()
                start = _now(device)
                step(recorded)
                if round_ >= 0:
                    times[recorded].append(_now(device) - start)
        # Writes a whole block and logs its values; in a run, once per block of steps.
        rows = len(hook._block)
        hook._block.uniform_(1, 2)
        hook._steps = list(range(1, rows + 1))
        start = _now(device)
        hook.after_train(runner)
        writing = (_now(device) - start) / rows
        return (statistics.median(times[False]), statistics.median(times[True]), writing,
                np.load(f'{folder}/norm_statistics/steps.npy').itemsize)


def _samples(batch, device):
    from mmpretrain.structures import DataSample
    return [DataSample().set_gt_label(i % 10).to(device) for i in range(batch)]


def _now(device):
    if device == 'cpu':
        return time.process_time()  # CPU time of all threads of this process
    torch.cuda.synchronize()
    return time.perf_counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=30, help='measured steps of each kind, up to 90')
    parser.add_argument('--only', choices=['digits', 'swin-t'], help='measure only this model')
    parser.add_argument('--device', type=device, default=get_device())
    args = parser.parse_args()
    un = dict(type='UN', warmup_iters=1)
    print(f'device {args.device}, torch {torch.__version__}, {torch.get_num_threads()} threads\n')
    print('| model | norm | step, ms | with the hook, ms | writing a step, ms | bytes a step | overhead |')
    print('|---|---|---|---|---|---|---|')
    for key, name, arguments, batch, size, channels in (
            ('digits', 'digits Swin, batch 64', DIGITS, 64, 32, 384),
            ('swin-t', 'Swin-T, batch 8', SWIN_T, 8, 224, 768)):
        if args.only not in (None, key):
            continue
        for norm in (dict(type='LN'), un):
            plain, recorded, writing, row = measure(
                build(arguments, norm, 10, channels), batch, size, args.steps, args.device)
            overhead = (recorded + writing) / plain - 1
            print(f'| {name} | {norm["type"]} | {1e3 * plain:.1f} | {1e3 * recorded:.1f} | '
                  f'{1e3 * writing:.2f} | {row} | {100 * overhead:.1f} % |', flush=True)


if __name__ == '__main__':
    main()
