"""Times LN and folded UN in full-integer LiteRT files of `mmunorm.export`: models of timm, torchvision, transformers.

    python benchmarks/export_families.py
    python benchmarks/export_families.py --snr --models 'timm, deit_small_patch16_224'

Random weights and noise, batch 1, one thread. The files of a model run in rotation; LN's file twice, as a control.
With `--snr`, the files of each norm and runtime in INT8 are compared with the same model in torch, without times.
Models of transformers are left out if it is not installed. Runs without OpenMMLab, which transformers 5 excludes.
"""
import argparse
import copy
import importlib.util
import json
import re
import tempfile
from functools import partial
from pathlib import Path

from mmunorm import compare, convert_norms, export, fuse_norms
from mmunorm.benchmark.environment import environment
from mmunorm.benchmark.measure import InterleavedTimer
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats import format_of
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.deploy.saving import export_file
from mmunorm.utils import PreflightError

import numpy as np
import timm
import torch
import torchvision

ROOT = Path(__file__).parent.parent


def of_transformers(name):
    import transformers
    if name == 'ViT-S':
        return transformers.ViTForImageClassification(transformers.ViTConfig(
            hidden_size=384, num_attention_heads=6, intermediate_size=1536))
    return transformers.SwinForImageClassification(transformers.SwinConfig())


MODELS = {
    'timm, deit_small_patch16_224': partial(timm.create_model, 'deit_small_patch16_224'),
    'timm, swin_tiny_patch4_window7_224': partial(timm.create_model, 'swin_tiny_patch4_window7_224'),
    'torchvision, vit_b_16': torchvision.models.vit_b_16,
    'torchvision, swin_t': torchvision.models.swin_t,
    'transformers, ViT of DeiT-S size': partial(of_transformers, 'ViT-S'),
    'transformers, Swin-T': partial(of_transformers, 'Swin-T')}
FOLDS = {'LN': None, 'exact, rotated': dict(rotate='hadamard'), 'UN, rotated': dict(rotate='hadamard'),
         'exact': dict(), 'UN': dict()}
INT8 = {'LiteRT, full-integer': ('.tflite', 'full'), 'LiteRT, dynamic range': ('.tflite', 'dynamic'),
        'LiteRT, matmul-only': ('.tflite', 'products'), 'OpenVINO': ('.xml', 'static'),
        'ONNX Runtime': ('.onnx', 'static'), 'ExecuTorch': ('.pte', 'static')}
RANGES, TESTED = 8, 4  # images


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=MODELS, metavar='MODEL', default=[
        name for name in MODELS if importlib.util.find_spec(name.partition(',')[0])])
    parser.add_argument('--rounds', type=int, default=30)
    parser.add_argument('--snr', action='store_true', help='the SNR in each INT8 format, and no times')
    parser.add_argument('--folds', nargs='+', choices=FOLDS, default=list(FOLDS), metavar='FOLD', help='of --snr')
    parser.add_argument('--formats', nargs='+', choices=INT8, default=list(INT8), metavar='FORMAT', help='of --snr')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def measured(name, rounds, folder):
    """The row of a model."""
    torch.manual_seed(0)
    ln, images = MODELS[name]().eval(), torch.randn(8, 3, 224, 224)
    un = copy.deepcopy(ln)
    convert_norms(un, images)
    report, runs, row = fuse_norms(un.eval(), example=images[:1]), {}, dict(model=name)
    row.update(norms=len(report.folded) + len(report.reduced) + len(report.kept), folded=len(report.folded))
    export(un, images[:1], folder / 'float.tflite')
    row['difference'] = max(compare(folder / 'float.tflite', un, images[:2]).largest.values())
    for norm, model in (('LN', ln), ('UN', un)):
        path = folder / f'{norm}.tflite'
        export(model, images[:1], path, int8='full', calibration=images)
        row[f'snr {norm}'] = next(iter(compare(path, model, images[:4]).snr.values()))
        for run in {'LN': ('LN', 'LN again'), 'UN': ('UN', )}[norm]:
            runs[run] = partial(ExportedModel(path, 1), images[:1].numpy())
    for run in runs.values():
        run()
    times = InterleavedTimer(runs, torch.device('cpu')).time(rounds)
    ms = {run: [1000 * second for second in seconds] for run, seconds in times.items()}
    return dict(row, ms=ms, torch=torch.__version__, cpu=re.search(
        r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())[1])


def snr_rows(name, folds, formats, folder):
    """A row for each form of a model's norms and each INT8 format: the SNR on images that gave no ranges."""
    torch.manual_seed(0)
    ln, images = MODELS[name]().eval(), torch.randn(RANGES + TESTED, 3, 224, 224)
    tested, ranges = images[:TESTED], images[TESTED:]
    un = copy.deepcopy(ln)
    if any(fold.startswith('UN') for fold in folds):
        convert_norms(un, ranges)
    for fold in folds:
        model = copy.deepcopy(un if fold.startswith('UN') else ln).eval()
        if FOLDS[fold] is not None:
            fuse_norms(model, example=ranges[:1], **FOLDS[fold])
        exportable = as_exportable(model, ranges[:1])  # one for all formats, of which some share a conversion
        for form in formats:
            suffix, int8 = INT8[form]
            row, path = dict(model=name, fold=fold, form=form), folder / f'm{suffix}'
            try:
                export_file(exportable, format_of(path), path, int8=int8,
                            samples=[(image.numpy(), ) for image in ranges.split(1)])
                row['snr'] = next(iter(compare(path, model, tested).snr.values()))
            except PreflightError as error:
                row['error'] = str(error)
            yield dict(row, environment=environment(torch.device('cpu')))


def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.snr:
        for name in args.models:
            with tempfile.TemporaryDirectory() as folder:
                for row in snr_rows(name, args.folds, args.formats, Path(folder)):
                    with open(args.out / 'export_families_int8.jsonl', 'a') as file:
                        print(json.dumps(row), file=file)
                    print(*(row.get(key) for key in ('model', 'fold', 'form', 'snr', 'error')), flush=True)
        return
    lines = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            row = measured(name, args.rounds, Path(folder))
        with open(args.out / 'export_families.jsonl', 'a') as file:
            print(json.dumps(row), file=file)
        ms = {run: np.median(times) for run, times in row['ms'].items()}
        lines.append([name, f'{row["folded"]} of {row["norms"]}', f'{row["difference"]:.0e}', f'{ms["LN"]:.0f}',
                      f'{ms["UN"]:.0f}', f'{ms["LN"] / ms["UN"]:.2f}x', f'{ms["LN again"] / ms["LN"]:.2f}x'])
    header = ['model', 'norms folded', 'difference, float', 'LN, ms', 'UN, ms', 'LN / UN', 'control']
    print(*('| ' + ' | '.join(line) + ' |' for line in [header, ['---'] * len(header), *lines]), sep='\n')


if __name__ == '__main__':
    main()
