"""Goes the whole way from a LayerNorm checkpoint to a tested file, with `--to exact` in minutes and without training.

`--to exact` folds gamma and beta of the LayerNorms; LayerNorms without weights are left. `--to UN` converts the norms,
trains on with the old model as the teacher, and folds. Both export, and measure accuracy and speed of the file beside
the model with LayerNorm in the same format. Each stage is one of the tools, printed as the command that it is. What a
later stage needs is checked before the first. The same call goes on after an interruption. OUT/report.html
has the conclusion, images and numbers.
"""
import argparse
import copy
import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmunorm.benchmark.models import EXACT
from mmunorm.checkpoints.loading import load_weights
from mmunorm.cli import run_tool
from mmunorm.cli.arguments import (
    add_config_arguments,
    command,
    load_config,
    non_negative,
    out_folder,
    positive,
    set_dataloader_defaults,
)
from mmunorm.cli.data_checks import check_data
from mmunorm.config.models import build_model, load_model
from mmunorm.config.presets import HELP, count_steps, renamed
from mmunorm.deploy.formats import VARIANTS, find_format, table
from mmunorm.deploy.formats.pytorch import TorchSession
from mmunorm.deploy.graph import norms_left
from mmunorm.deploy.openmmlab import PARTS, describe_model, prepare_export
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.engine.calibration import FolderImages
from mmunorm.engine.conversion import parse_goal
from mmunorm.engine.distillation import backbone_of
from mmunorm.fusion import fuse_norms
from mmunorm.norms.replace import layer_norms
from mmunorm.utils import PreflightError, RunError, write_text
from ship_report import Outcome, draw_samples, write_report

from mmengine.config import Config
from mmengine.registry import DATASETS

# Warm-up of UN, as a share of the training steps.
WARMUP = 0.5
# Learning rate after an adaptation, as a share of the config's: docs/results/conversion.md.
ADAPTED_RATE = 0.3


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, epilog=f'formats:\n\n{table()}',
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file of a classifier or detector with LayerNorm')
    parser.add_argument('checkpoint', help='its checkpoint, or a published one: docs/checkpoints.md')
    parser.add_argument('--format', required=True, help='format of the file; see the table below')
    parser.add_argument('--int8', nargs='?', const='', metavar='KIND',
                        help='in INT8; the table below has the kinds, the usual one first')
    parser.add_argument('--parts', choices=PARTS, default=PARTS[0],
                        help='backbone is for detectors that cannot be exported whole: backbone and neck become the '
                        'file, the rest stays in torch (default: whole)')
    parser.add_argument('--beside', nargs='+', default=[], choices=list(VARIANTS), metavar='ROW',
                        help='measure all models in these, too, such as openvino: the rows of '
                        'tools/deploy/benchmark.py')
    parser.add_argument('--out', type=Path, required=True, help='folder for all results')
    parser.add_argument('--to', default='UN', metavar='NORM',
                        help='exact, which folds the LayerNorms without conversion and training, or the norm to '
                        f'convert to (default: UN): {HELP}')
    parser.add_argument('--steps', type=non_negative, metavar='N',
                        help="training steps after the conversion (default: a quarter of the config's); 0 for none")
    parser.add_argument('--num-samples', type=positive, metavar='N',
                        help='training images for the statistics of norms (default: 512) and the ranges of INT8 '
                        '(default: 300)')
    parser.add_argument('--images', metavar='FOLDER',
                        help="convert with the images in this folder instead of the config's training data; no labels "
                        'needed')
    parser.add_argument('--adapt-steps', type=non_negative, metavar='N',
                        help='steps before that, which need no labels (default: 300); 0 for none')
    parser.add_argument('--dry-run', action='store_true', help='print the stages, and end')
    add_config_arguments(parser, norm=False)
    args = parser.parse_args(argv)
    if args.to == EXACT:
        for name in ('steps', 'adapt_steps', 'images'):
            if getattr(args, name) is not None:
                parser.error(f'--{name.replace("_", "-")} cannot be combined with --to exact, which trains nothing')
    args.adapt_steps = 300 if args.adapt_steps is None else args.adapt_steps
    return args


@dataclass(frozen=True)
class Stage:
    """One command of the chain."""
    title: str
    command: tuple[str, ...]  # a tool, and its arguments
    result: Path  # the file or folder that it writes
    prepare: Callable[[], None] | None = None  # called before the command

    def __str__(self):
        return f'python {shlex.join(self.command)}'


def run_stages(stages, out):
    """Runs the stages that are not done yet; returns the seconds that each took, by command.

    `out/ship.json` lists the finished stages; a PreflightError if it is of another chain. An interrupted training
    resumes. A RunError if a stage failed.
    """
    file = out / 'ship.json'
    done = json.loads(file.read_text()) if file.exists() else {}
    if others := [command for command in done if command not in map(str, stages)]:
        raise PreflightError(f'--out {out} has another chain, with `{others[0]}`: name another folder.')
    for number, stage in enumerate(stages, 1):
        print(f'\n=== {number}/{len(stages)} {stage.title}\n$ {stage}', flush=True)
        if str(stage) in done and stage.result.exists():
            print('=== is done', flush=True)
            continue
        if stage.prepare:
            stage.prepare()
        start = time.time()
        status = run_tool(stage.command)
        if status:
            raise RunError(f'the command above ended with status {status}. Once that is fixed, the same call of '
                           f'ship.py goes on from there.')
        done[str(stage)] = round(time.time() - start, 1)
        write_text(file, json.dumps(done, indent=1))
        print(f'=== done in {done[str(stage)]:.0f} s', flush=True)
    return done


def options_of(args):
    """The options with which the old model is read; `--cfg-options` as they were typed."""
    options = [f'{key}={value}' for key, value in (args.cfg_options or {}).items()]
    return trust_option(args) + (('--cfg-options', *options) if options else ())


def trust_option(args):
    return ('--trust-checkpoint', ) if args.trust_checkpoint else ()


def tool(name):
    """A tool's path, from the current folder."""
    return os.path.relpath(Path(__file__).resolve().parent / name)


def plan(args, chosen, int8, steps):
    """The stages, and recipe, checkpoint and file of the result."""
    model, options = (args.config, args.checkpoint), options_of(args)
    if args.to == EXACT:
        recipe, checkpoint = model
        stages = [Stage('Fold the norms, and test', (tool('test.py'), *model, '--fuse', '--work-dir',
                                                     f'{args.out}/folded', *options), args.out / 'folded')]
        read, baseline = options, ()
    else:
        stages, recipe, checkpoint = plan_conversion(args, steps)
        read, baseline = (), ('--baseline', *model)
    trained = (str(recipe), str(checkpoint))
    file = args.out / f'model{chosen.suffixes[0]}'
    kind = () if int8 is None else ('--int8', int8)
    parts = () if args.parts == PARTS[0] else ('--parts', args.parts)
    samples = () if args.num_samples is None else ('--num-samples', str(args.num_samples))
    stages.append(Stage('Fold and export', (tool('deploy/export.py'), *trained, '--format', args.format, *kind, *parts,
                                            *samples, '--out', str(file), *read), file))
    form = form_of(chosen.name, int8)
    if rows := list(dict.fromkeys([*([form] if form else []), *args.beside])):
        exported = ('--file', form, str(file)) if form else ()
        # In floating point, what torch has is known.
        tested = [name for name in rows if name == form or VARIANTS[name][1].int8]
        stages.append(Stage(
            'Test and measure it beside LayerNorm',
            (tool('deploy/benchmark.py'), *trained, *baseline, '--formats', *rows, '--metrics-of', *tested, *exported,
             *parts, *samples, '--out', f'{args.out}/speed', *options),
            args.out / 'speed/formats.json'))
    return stages, recipe, checkpoint, file


def plan_conversion(args, steps):
    """The stages up to a checkpoint with another norm, and its recipe and checkpoint."""
    out, name = args.out, parse_goal(args.to)[0]
    to = f'{name}=UN,warmup_iters={WARMUP}' if args.to == 'UN' and steps else args.to
    stem = renamed(Path(args.config).stem, 'LN', name)
    images = () if args.images is None else ('--images', args.images)
    recipe, checkpoint = out / 'converted' / f'{stem}.py', out / 'converted' / f'{stem}.pth'
    stages = [Stage(
        'Convert the norms, and test before and after',
        (tool('convert_norms.py'), args.config, args.checkpoint, '--out', f'{out}/converted', '--to', to,
         '--num-samples', str(args.num_samples or 512), *images, '--adapt-steps', str(args.adapt_steps), '--test',
         *options_of(args)),
        out / 'converted/metrics.json')]
    if steps:
        converted, recipe = recipe, out / f'{stem}.py'
        checkpoint = out / f'trained/iter_{steps}.pth'
        stages += [
            Stage('Train on, with the model with LayerNorm as the teacher',
                  (tool('train.py'), str(recipe), '--work-dir', f'{out}/trained', '--resume', *trust_option(args)),
                  checkpoint, lambda: write_recipe(converted, steps, recipe, args.adapt_steps > 0)),
            Stage('Fold the norms, and test', (tool('test.py'), str(recipe), str(checkpoint), '--fuse', '--work-dir',
                                               f'{out}/folded'), out / 'folded')]
    return stages, recipe, checkpoint


def usage_of(args, chosen, recipe, checkpoint, file):
    """How the file is used: a line."""
    if args.parts == PARTS[0]:
        return chosen.usage(file)
    return f'use it: python tools/deploy/test.py {recipe} {file} --checkpoint {checkpoint}'


def folded(model):
    """Folds a model; returns the names of what is left of its norms, see :func:`norms_left`, and the report."""
    report = fuse_norms(model)
    return norms_left(model), report


def outcome_of(args, model, steps, row, recipe, checkpoint, file, images):
    """The results of all stages, the table of the conversion or '', and the report of the folding."""
    metrics, losses = {}, ''
    exact, fusion = folded(copy.deepcopy(model))
    left = {'LayerNorm': norms_left(model), EXACT: exact}
    if args.to != EXACT:
        before = json.loads((args.out / 'converted/metrics.json').read_text())
        metrics = {'LayerNorm': before['before'], 'converted': before['after']}
        losses = next((args.out / 'converted').glob('*.md')).read_text()
        left[parse_goal(args.to)[0]], fusion = folded(load_model(load_config(str(recipe)), str(checkpoint)))
    if steps or args.to == EXACT:
        metrics[EXACT if args.to == EXACT else 'trained and folded'] = newest_metrics(args.out / 'folded')
    measured = args.out / 'speed/formats.json'
    result = json.loads(measured.read_text()) if measured.exists() else None
    return Outcome(steps, file, row, '', metrics, result, left, images), losses, fusion


def write_recipe(converted, steps, path, adapted):
    """Writes the config of the training that follows a conversion: so many steps, with the teacher.

    The rate rises for a tenth of the steps and then falls along a cosine to a hundredth. An adapted model is near its
    goal, and gets a share of the config's own rate, which would first take it away from there.
    """
    cfg = Config.fromfile(converted)
    rise = max(1, steps // 10)
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=steps, val_begin=steps + 1)  # the next stage tests
    cfg.param_scheduler = [dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=rise)]
    if rise < steps:
        cfg.param_scheduler.append(dict(type='CosineAnnealingLR', eta_min_ratio=0.01, by_epoch=False, begin=rise,
                                        end=steps))
    cfg.optim_wrapper.clip_grad = dict(max_norm=1.0)
    if adapted:
        cfg.optim_wrapper.optimizer.lr *= ADAPTED_RATE
    cfg.log_processor = dict(by_epoch=False)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=max(1, min(1000, steps)))
    write_text(path, cfg.pretty_text)


def form_of(name, int8):
    """The row of `tools/deploy/benchmark.py` for a format and a kind of INT8; None if it has none."""
    return next((row for row, (format_, form) in VARIANTS.items()
                 if format_.name == name and form.int8 == int8 and not form.load_options), None)


def newest_metrics(work_dir):
    """The metrics that a test tool wrote last under a work directory, without its times."""
    logs = [path for path in work_dir.glob('*/*.json') if path.stem == path.parent.name]
    metrics = json.loads(max(logs, key=lambda path: path.name).read_text())
    return {name: value for name, value in metrics.items() if '/' in name}


@command
def main(argv=None):
    args = parse_args(argv)
    chosen = find_format(args.format)
    int8 = chosen.check(args.int8, '--int8')
    for name in args.beside:
        VARIANTS[name][0].check(VARIANTS[name][1].int8)
    cfg = load_config(args.config, args.cfg_options)
    forms = [(chosen, int8), *((VARIANTS[name][0], VARIANTS[name][1].int8) for name in args.beside)]
    calibrates = any(form.needs_images(kind) for form, kind in forms)
    trains = calibrates or args.to != EXACT and (args.images is None or args.steps != 0)
    if trains and cfg.get('train_dataloader') is None:
        converts = '' if args.to == EXACT else '--images, --steps 0 and '
        raise PreflightError(f'{args.config} has no train_dataloader: take {converts}a format without calibration.')
    check_data(cfg, ['train'] * trains + ['val', 'test'])
    set_dataloader_defaults(cfg)
    if args.images is not None:
        FolderImages(cfg, args.images)
    model = build_model(cfg)
    if not layer_norms(model):
        raise PreflightError(f'{args.config} has no LayerNorm to {"fold" if args.to == EXACT else "convert"}.')
    meta = load_weights(model, args.checkpoint)
    exportable = prepare_export(model.eval(), describe_model(model, cfg, meta, parts=args.parts))
    chosen.check_model(exportable)
    steps = 0 if args.to == EXACT else max(1, count_steps(cfg) // 4) if args.steps is None else args.steps
    if backbone_of(model) is None:
        args.adapt_steps = 0
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    stages, recipe, checkpoint, file = plan(args, chosen, int8, steps)
    if args.dry_run:
        for number, stage in enumerate(stages, 1):
            print(f'\n{number}/{len(stages)} {stage.title}\n$ {stage}')
        return stages
    out_folder(args.out)
    done = args.out / 'ship.json'
    if done.exists() and os.path.isfile(args.checkpoint) and os.path.getmtime(args.checkpoint) > done.stat().st_mtime:
        raise PreflightError(f'--out {args.out} has results of an older {args.checkpoint}: name another folder.')
    seconds = run_stages(stages, args.out)
    row = form_of(chosen.name, int8)
    outcome, losses, fusion = outcome_of(args, model, steps, row, recipe, checkpoint, file,
                                         len(dataset))
    outcome.usage = usage_of(args, chosen, recipe, checkpoint, file)
    runners = {}
    if args.parts == PARTS[0]:
        runners['LayerNorm, torch'] = ExportedModel(TorchSession(exportable.graph, exportable.meta))
    if runners and outcome.row:
        runners[f'the file, {file.name}'] = ExportedModel(file)
    report = args.out / 'report.html'
    write_report(
        report, f'{Path(args.config).stem}: from LayerNorm to {file.name}', outcome, stages, seconds, losses,
        str(fusion), draw_samples(dataset, runners))
    print(*outcome.conclusion(), f'written: {file}', f'written: {report}', sep='\n')
    if args.to != EXACT and any(outcome.left[outcome.name]):
        print(f'some norms did not fold: {outcome.norms_left}')
    return outcome


if __name__ == '__main__':
    main()
