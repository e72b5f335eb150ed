"""Measures trained, folded models in INT8: metrics, and the SNR of a classifier's logits.

    python benchmarks/int8.py --models LN=LN_CONFIG:CHECKPOINT[:CHECKPOINT...] UN=UN_CONFIG:CHECKPOINT...

Several checkpoints of a model are its seeds. `--folds` are ways to fold its norms, of which all are measured.
"""
import argparse
import itertools
import json
import tempfile
from pathlib import Path

from mmunorm.benchmark.environment import environment
from mmunorm.benchmark.files import main_metrics
from mmunorm.benchmark.subjects import Subject
from mmunorm.cli.arguments import command, load_config, positive, set_dataloader_defaults
from mmunorm.deploy.formats import VARIANTS
from mmunorm.deploy.formats.pytorch import TorchSession
from mmunorm.deploy.openmmlab import loaded_model
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.deploy.tasks import batch_of
from mmunorm.engine.calibration import test_images, test_metrics, training_images
from mmunorm.fusion import fuse_norms
from mmunorm.utils import PreflightError

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
FOLDS = {'offline': dict(layer_norms='keep'), 'exact': dict(), 'rotated': dict(rotate='hadamard')}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', required=True, type=parse_model,
                        metavar='NAME=CONFIG:CHECKPOINT...')
    parser.add_argument('--formats', nargs='+', choices=[name for name, (_, form) in VARIANTS.items() if form.int8],
                        metavar='FORMAT', default=['openvino-int8', 'onnx-int8'], help='forms in INT8')
    parser.add_argument('--folds', nargs='+', choices=list(FOLDS), default=['offline'],
                        help='offline norms alone; LayerNorms except a scale, too; and streams rotated')
    parser.add_argument('--num-samples', type=positive, default=300, help='training images for calibration')
    parser.add_argument('--num-images', type=positive, default=500, help='test images for the SNR')
    parser.add_argument('--batch', type=positive, default=1)
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def parse_model(text):
    """The name, the config and the checkpoints of one of `--models`."""
    name, _, paths = text.partition('=')
    config, *checkpoints = paths.split(':')
    if not checkpoints:
        raise argparse.ArgumentTypeError(f'takes NAME=CONFIG:CHECKPOINT, got {text!r}')
    return name, config, checkpoints


def centred(scores):
    """Logits minus their mean over the classes of an image."""
    return scores - scores.mean(1, keepdim=True)


def logits(runner, arrays):
    """The :func:`centred` logits of a classifier."""
    return centred(torch.from_numpy(runner(*arrays)['scores']).double().clamp(min=1e-12).log())


def measure(config, checkpoint, fold, args, folder):
    """One dict per form: `form`, `metrics`, and for a classifier `snr` in dB."""
    cfg = load_config(config)
    set_dataloader_defaults(cfg)
    model, meta = loaded_model(cfg, checkpoint)
    fuse_norms(model, **FOLDS[fold])
    subject = Subject('model', model, meta, args.batch, folder / 'files', torch.get_num_threads(),
                      training_images(cfg, args.num_samples), layer_norms='keep')
    arrays = batch_of(test_images(cfg, args.num_images), meta) if meta['task'] == 'classifier' else None
    exact = None
    openers = {'float': lambda: TorchSession(subject.exportable.graph, subject.exportable.meta)}
    openers |= {VARIANTS[name][1].label: lambda name=name: subject.export(name)[0]() for name in args.formats}
    for form, open_session in openers.items():
        try:
            runner = ExportedModel(open_session())
        except PreflightError as error:  # some forms have no kernel for LayerNorm
            yield dict(form=form, metrics={}, error=str(error))
            continue
        row = dict(form=form, metrics=main_metrics(test_metrics(cfg, runner, form)))
        if not runner.is_detector:
            got = logits(runner, arrays)
            if exact is None:
                exact = got
            else:
                row['snr'] = 10 * torch.log10(exact.square().sum() / (got - exact).square().sum()).item()
        yield row


def cell(values):
    """Mean and standard deviation over seeds; an AP, which is at most 1, has three digits."""
    digits = 3 if max(values) <= 1 else 2
    spread = f' ± {np.std(values, ddof=1):.{digits}f}' if len(values) > 1 else ''
    return f'{np.mean(values):.{digits}f}{spread}'


@command
def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = ['| model | folded | form | metrics | SNR, dB |', '|---|---|---|---|---|']
    for (name, config, checkpoints), fold in itertools.product(args.models, args.folds):
        seeds = []
        for seed, checkpoint in enumerate(checkpoints):
            with tempfile.TemporaryDirectory() as folder:
                seeds.append(list(measure(config, checkpoint, fold, args, Path(folder))))
            with open(args.out / 'int8.jsonl', 'a') as file:  # after each seed, as tests take hours
                for row in seeds[-1]:
                    print(json.dumps(dict(model=name, fold=fold, seed=seed, **row,
                                          environment=environment(torch.device('cpu')))), file=file)
        for rows in zip(*seeds, strict=True):
            metrics = ', '.join(f'{key} {cell([row["metrics"][key] for row in rows])}' for key in rows[0]['metrics'])
            metrics = metrics or rows[0]['error']
            snr = cell([row['snr'] for row in rows]) if 'snr' in rows[0] else ''
            lines.append(f'| {name} | {fold} | {rows[0]["form"]} | {metrics} | {snr} |')
    print('\n'.join(lines))


if __name__ == '__main__':
    main()
