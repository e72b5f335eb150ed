"""Trains small models, and lists each with its config, score, log, weights and checksum. Run by `make zoo`.

Finished models are not trained again, and interrupted ones resume. `work_dirs/zoo/NAME/weights.pth` has the weights
without the optimizer; `work_dirs/zoo/README.md` and `zoo.json` have the list.
"""
import argparse
import hashlib
import json
import shlex
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from mmunorm.benchmark.environment import device_name, environment
from mmunorm.checkpoints.loading import read_checkpoint
from mmunorm.cli import run_tool
from mmunorm.cli.arguments import command
from mmunorm.tables import markdown_table
from mmunorm.utils import PreflightError, RunError, whole_file, write_text

import torch

ROOT = Path(__file__).resolve().parents[3]
OUT = 'work_dirs/zoo'
DIGITS = 'projects/digits/tools/make_digits.py'
PHOTOGRAPHS = 'projects/photographs/tools/make_photographs.py'
CPU = torch.device('cpu')
SCORES = {'accuracy/top1': 'top-1 accuracy (%)', 'coco/bbox_mAP': 'box AP', 'coco/segm_mAP': 'mask AP'}


@dataclass(frozen=True)
class Recipe:
    """One model of the zoo.

    Attributes:
        name: name of its folder.
        config: training config, relative to the root of the repository.
        data: the tool that makes its data; empty if a package bundles them.
        norm: value of `--norm`; empty for the norm of the config.
        start: the model of the zoo that provides its pretrained backbone.
    """
    name: str
    config: str
    data: str = DIGITS
    norm: str = ''
    start: str = ''

    def command(self) -> tuple[str, ...]:
        """The call of tools/train.py, in bfloat16 if the CPU has bfloat16 instructions."""
        norm = ('--norm', self.norm) if self.norm else ()
        start = (f'pretrained={OUT}/{self.start}/weights.pth', ) if self.start else ()
        # Other CPUs convert each number, which is slower.
        fast = {'avx512_bf16', 'bf16'} & set(environment(CPU)['instructions'])
        amp = ('optim_wrapper.type=BFloat16OptimWrapper', ) if fast else ()
        return ('tools/train.py', self.config, *norm, '--work-dir', f'{OUT}/{self.name}', '--resume', '--cfg-options',
                'randomness.seed=0', *amp, *start)


RECIPES = (
    Recipe('vit_ln_classifier', 'projects/deep/configs/vit_un_classifier.py', data='', norm='LN'),
    Recipe('vit_un_classifier', 'projects/deep/configs/vit_un_classifier.py', data=''),
    Recipe('swin_ln_classifier', 'projects/digits/configs/swin_ln_classifier.py'),
    Recipe('swin_un_classifier', 'projects/digits/configs/swin_un_classifier.py'),
    Recipe('swin_un_plus_classifier', 'projects/digits/configs/swin_un_classifier.py', norm='UN+'),
    Recipe('t2t_un_classifier', 'projects/digits/configs/t2t_un_classifier.py'),
    Recipe('swin_ln_maskrcnn', 'projects/digits/configs/swin_ln_maskrcnn.py', start='swin_ln_classifier'),
    Recipe('swin_un_maskrcnn', 'projects/digits/configs/swin_un_maskrcnn.py', start='swin_un_classifier'),
    Recipe('swin_ln_photographs', 'projects/photographs/configs/swin_ln_photographs.py', data=PHOTOGRAPHS),
    Recipe('swin_un_photographs', 'projects/photographs/configs/swin_un_photographs.py', data=PHOTOGRAPHS),
    Recipe('t2t_un_photographs', 'projects/photographs/configs/t2t_un_photographs.py', data=PHOTOGRAPHS),
    Recipe('swin_un_maskrcnn_photographs', 'projects/photographs/configs/swin_un_maskrcnn_photographs.py',
           data=PHOTOGRAPHS, start='swin_un_photographs'),
)


def train(recipe: Recipe) -> dict:
    """Trains a model; returns its entry in the list."""
    folder = ROOT / OUT / recipe.name
    print(f'\n=== {recipe.name}\n$ python {shlex.join(recipe.command())}', flush=True)
    if status := run_tool(recipe.command(), ROOT):
        raise RunError(f'the command above ended with status {status}. Fix this and run the same command to continue.')
    checkpoint = read_checkpoint(str(ROOT / (folder / 'last_checkpoint').read_text().strip()))
    meta = {key: value for key, value in checkpoint['meta'].items() if key in ('cfg', 'dataset_meta', 'epoch', 'iter')}
    weights = folder / 'weights.pth'
    with whole_file(weights) as part:
        torch.save(dict(meta=meta, state_dict=checkpoint['state_dict']), part)
    logs = (log.read_text().splitlines() for log in sorted(folder.glob('*/vis_data/scalars.json')))
    last = {name: value for lines in logs for line in lines for name, value in json.loads(line).items()}
    return dict(
        name=recipe.name,
        config=recipe.config,
        command=f'python {shlex.join(recipe.command())}',
        score={label: round(float(last[name]), 4) for name, label in SCORES.items() if name in last},
        log=str(max(folder.glob('*/*.log')).relative_to(ROOT)),
        weights=str(weights.relative_to(ROOT)),
        sha256=checksum(weights),
        cpu=f'{device_name(CPU)}, {torch.backends.cpu.get_cpu_capability()}',
        date=date.today().isoformat())


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_finished(recipe: Recipe, entries: dict[str, dict]) -> bool:
    """Whether the list has the model and its weights are unchanged."""
    entry = entries.get(recipe.name)
    if entry is None:
        return False
    weights = ROOT / entry['weights']
    if entry['command'] != f'python {shlex.join(recipe.command())}' or not weights.is_file() or (
            checksum(weights) != entry['sha256']):
        raise PreflightError(f'{weights.parent} is from another recipe, or its weights have changed: remove it '
                             'and its entry in zoo.json to train the model again.')
    return True


def markdown(entries: dict[str, dict]) -> str:
    """The list as a page: logs and weights are in the folder of their model."""
    rows = []
    for recipe in RECIPES:
        entry = entries.get(recipe.name)
        if entry is None:
            rows.append([recipe.name, f'`{recipe.config}`', 'not trained here'])
            continue
        score = ', '.join(f'{label} {value:g}' for label, value in entry['score'].items())
        log, weights = (Path(entry[key]).name for key in ('log', 'weights'))
        rows.append([recipe.name, f'`{recipe.config}`', score, f'`{log}`', f'`{weights}`', f'`{entry["sha256"][:12]}`'])
    lines = markdown_table(['model', 'config', 'score', 'log', 'weights', 'sha256 begins'], rows)
    commands = [entries[recipe.name]['command'] for recipe in RECIPES if recipe.name in entries]
    lines += ['', '```bash', *commands, '```', '']
    lines += [f'- {name}: {entry["cpu"]}, {entry["date"]}' for name, entry in entries.items()]
    return '\n'.join(lines) + '\n'


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('names', nargs='*', metavar='NAME', help='models to train, from '
                        f'{", ".join(recipe.name for recipe in RECIPES)}; default: all')
    return parser.parse_args(argv)


@command
def main(argv=None):
    names = parse_args(argv).names
    known = {recipe.name: recipe for recipe in RECIPES}
    if unknown := [name for name in names if name not in known]:
        raise PreflightError(f'there is no model {unknown[0]}; choose from {", ".join(known)}.')
    file = ROOT / OUT / 'zoo.json'
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(file.read_text()) if file.exists() else {}
    wanted = [known[name] for name in names] or list(RECIPES)
    pending = [recipe for recipe in wanted if not is_finished(recipe, entries)]
    ready = {''}
    for recipe in pending:
        if recipe.data not in ready:  # only when needed: not every system has the photographs
            if status := run_tool((recipe.data, ), ROOT):
                raise RunError(f'{recipe.data} ended with status {status}.')
            ready.add(recipe.data)
        if recipe.start and recipe.start not in entries:
            raise PreflightError(f'{recipe.name} starts from {recipe.start}: train that first.')
        entries[recipe.name] = train(recipe)
        write_text(file, json.dumps(entries, indent=1))
        write_text(file.with_name('README.md'), markdown(entries))
    print(f'{len(wanted)} models, {len(pending)} of them new: {OUT}/README.md')


if __name__ == '__main__':
    main()
