"""Times LN and folded UN in full-integer LiteRT files of `mmunorm.export`: models of timm, torchvision, transformers.

    python benchmarks/export_families.py

Random weights and noise, batch 1, one thread. The files of a model run in rotation; LN's file twice, as a control.
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
from mmunorm.benchmark.measure import InterleavedTimer
from mmunorm.deploy.exported import ExportedModel

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


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=MODELS, metavar='MODEL', default=[
        name for name in MODELS if importlib.util.find_spec(name.partition(',')[0])])
    parser.add_argument('--rounds', type=int, default=30)
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


def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
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
