"""Compares methods to convert a trained LayerNorm model to UN: metrics before, during and after fine-tuning, folded.

    python projects/paper/tools/compare_norms.py projects/digits/configs/swin_un_classifier.py --norms LN UN \
        --out COMPARED
    python benchmarks/conversion.py classifier COMPARED --out OUT

COMPARED has the LayerNorm checkpoints of all seeds; its UN from scratch is a row if it exists. Each method starts from
the checkpoint of its seed with the recipe of projects/digits. To continue after an interruption, run the same command;
finished runs are not repeated. The results are OUT/conversion.md, .csv and .png.
"""
import argparse
import copy
import json
import signal
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mmunorm
from mmunorm import convert_norms, fuse_norms
from mmunorm.benchmark.files import main_metrics
from mmunorm.checkpoints.loading import load_weights
from mmunorm.cli.arguments import command, load_config, out_folder, positive, set_dataloader_defaults
from mmunorm.config.models import build_model
from mmunorm.config.presets import NORMS, replace_norm_cfgs
from mmunorm.conversion.statistics import NUM_SUMS, nearest_affine, token_sums
from mmunorm.engine.calibration import samples_of, test_metrics, training_batches
from mmunorm.engine.conversion import adapt_backbone
from mmunorm.fusion.norms import affine_of
from mmunorm.norms import OfflineNorm
from mmunorm.norms.replace import layer_norms
from mmunorm.tables import markdown_table
from mmunorm.utils import PreflightError, RunError, write_text
from projects.paper.paper.curves import curves_figure, read_scalars
from projects.paper.paper.layout import save
from projects.paper.paper.measures import write_csv
from projects.paper.paper.runs import ComparedRun
from projects.paper.paper.training import train_all

import numpy as np
import torch
from mmengine.config import Config, DictAction
from torch import nn

ROOT = Path(__file__).parent.parent
TASKS = dict(classifier='classifier', detector='maskrcnn')
STEPS = dict(classifier=188, detector=174)
VALIDATIONS = dict(classifier=4, detector=2)
PERTURBATIONS = {
    'darker': lambda image, rng: image * 0.6,
    'noisier': lambda image, rng: image + 25 * torch.randn(image.shape, generator=rng),
}
SIZE_FACTOR = 1.25
PERTURBED = ('LN, trained on', 'affine, sequential, teacher')  # also tested on perturbed images


@dataclass(frozen=True)
class Method:
    """A method to convert LayerNorm to another norm.

    Attributes:
        start: initialization of the norms, one of `STARTS`; '' keeps LayerNorm.
        teacher: whether the LayerNorm model is the teacher.
        norm: the final norm.
        keep: LayerNorms to keep, as for `convert_norms`.
        step_factor: a factor for the steps.
        rate: the learning rate; None for that of training from scratch.
    """
    start: str
    teacher: bool = False
    norm: str = 'UN'
    keep: tuple = ()
    step_factor: int = 1
    rate: float | None = None


METHODS = {
    'LN, trained on': Method(''),
    'gamma kept': Method('kept'),
    'affine, at once': Method('at once'),
    'affine, sequential': Method('sequential'),
    'affine, sequential, teacher': Method('sequential', teacher=True),
    'LN, trained on, teacher': Method('', teacher=True),
    'UN+, sequential, teacher': Method('sequential', teacher=True, norm='UN+'),
    'patch embedding kept, teacher': Method('sequential', teacher=True, keep=('backbone.patch_embed.norm', )),
    'sequential, teacher, 2 x steps': Method('sequential', teacher=True, step_factor=2),
    'adapted, teacher': Method('adapted', teacher=True),
    'adapted, teacher, 2 x steps': Method('adapted', teacher=True, step_factor=2),
    'LN, trained on, 2 x steps': Method('', step_factor=2),
    'LN, trained on, 2 x steps, rate 0.0003': Method('', step_factor=2, rate=3e-4),
    'adapted, teacher, 2 x steps, rate 0.0003': Method('adapted', teacher=True, step_factor=2, rate=3e-4),
    **{f'{name}, rate {rate:g}': Method(start, teacher, rate=rate) for rate in (3e-4, 1e-4)
       for name, start, teacher in (
           ('LN, trained on', '', False), ('LN, trained on, teacher', '', True),
           ('affine, sequential, teacher', 'sequential', True), ('adapted, teacher', 'adapted', True))},
}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('task', choices=TASKS)
    parser.add_argument('compared', type=Path, help='folder that compare_norms.py wrote, with LN and UN')
    parser.add_argument('--ways', nargs='+', choices=METHODS, default=list(METHODS), metavar='WAY',
                        help=f'default: all of {"; ".join(METHODS)}')
    parser.add_argument('--seeds', type=positive, default=3)
    parser.add_argument('--jobs', type=positive, default=1, help='runs at a time')
    parser.add_argument('--num-samples', type=positive, default=512, help='training images for the statistics')
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE',
                        help='override settings of the recipe, e.g. optim_wrapper.type=BFloat16OptimWrapper')
    return parser.parse_args(argv)


def last_checkpoint(folder):
    """The last checkpoint of a finished run."""
    try:
        return folder / Path((folder / 'last_checkpoint').read_text().strip()).name
    except OSError:
        raise PreflightError(f'there is no finished run in {folder}: train it with compare_norms.py.') from None


def without_layer_norm(model, run, norm_cfg, kept):
    """Replaces each LayerNorm by an affine map, measured on its inputs in `run()`; `kept` keeps gamma and beta."""
    norms = layer_norms(model)
    sums = {name: torch.zeros(NUM_SUMS, norm.normalized_shape[0], dtype=torch.float64) for name, norm in norms.items()}

    def measure(norm, args, name):
        sums[name] += token_sums(args[0].detach().flatten(0, -2).double(), norm.eps)

    handles = [norm.register_forward_pre_hook(partial(measure, name=name)) for name, norm in norms.items()]
    run()
    for handle in handles:
        handle.remove()
    mmunorm.replace_norms(model, norm_cfg)
    for name, norm in norms.items():
        gamma, beta = affine_of(norm)
        mean, square = sums[name][1:3] / sums[name][0]
        target = model.get_submodule(name)
        a, b = (gamma / (square + target.eps).sqrt(), beta) if kept else nearest_affine(
            sums[name], gamma, beta, torch.finfo(torch.float32).eps)
        target.set_affine(a, b, mean, square)


ADAPT_STEPS = 300
STARTS = ('kept', 'at once', 'sequential', 'adapted')


def layer_norm_model(args, checkpoint):
    cfg = load_config(str(ROOT / f'projects/digits/configs/swin_ln_{TASKS[args.task]}.py'))
    cfg.model.backbone.init_cfg = None
    set_dataloader_defaults(cfg)
    model = build_model(cfg)
    load_weights(model, str(checkpoint))
    return cfg, model.eval()


@torch.no_grad()
def start_weights(args, method, seed, teacher):
    """The initial weights of a run, and the metrics of the model with them."""
    start = f'{method.start}_{method.norm}{"_kept" * bool(method.keep)}' if method.start in STARTS else 'LN'
    path = args.out / 'starts' / f'{start}_{seed}.pth'
    measured = path.with_suffix('.json')
    if not measured.exists():
        cfg, model = layer_norm_model(args, teacher)
        if method.start in STARTS:
            batches = training_batches(cfg, args.num_samples)
            if method.start in ('sequential', 'adapted'):
                backbone = copy.deepcopy(model.backbone)
                convert_norms(model, batches, NORMS[method.norm], method.keep, progress=True)
                if method.start == 'adapted':
                    with torch.enable_grad():
                        print(adapt_backbone(model, backbone, samples_of(batches), ADAPT_STEPS,
                                             len(batches[0]['inputs'])))
            else:
                without_layer_norm(model, lambda: [model(**model.data_preprocessor(batch, False), mode='tensor')
                                                   for batch in batches], NORMS[method.norm], method.start == 'kept')
        metrics = main_metrics(test_metrics(cfg, model.eval(), f'testing {method.start or "LN"}'))
        path.parent.mkdir(parents=True, exist_ok=True)
        if method.start in STARTS:
            torch.save(dict(state_dict=model.state_dict()), path)
        write_text(measured, json.dumps(metrics))
    return (path if method.start in STARTS else teacher), json.loads(measured.read_text())


def recipe(args, method, seed, teacher, weights):
    """The config of a run."""
    cfg = load_config(str(ROOT / f'projects/digits/configs/swin_un_{TASKS[args.task]}_converted.py'), args.cfg_options)
    steps = STEPS[args.task] * method.step_factor
    cfg.load_from = str(weights.resolve())
    for hook in cfg.custom_hooks:
        if hook.type == 'DistillationHook':
            hook.checkpoint = str(teacher.resolve())
    if not method.teacher:
        cfg.custom_hooks = [hook for hook in cfg.custom_hooks if hook.type != 'DistillationHook']
    if not method.start:
        cfg.model.backbone = replace_norm_cfgs(cfg.model.backbone, dict(type='LN'))
    elif method.norm != 'UN':
        inherited = {key: cfg.model.backbone.norm_cfg[key] for key in ('window', 'warmup_iters')}
        cfg.model.backbone = replace_norm_cfgs(cfg.model.backbone, {**NORMS[method.norm], **inherited})
    if method.keep:
        plain = layer_norm_model(args, teacher)[1]
        wanted = [name for name in layer_norms(plain) if name not in method.keep]
        norm_cfg = cfg.model.backbone.norm_cfg
        cfg.model.backbone = replace_norm_cfgs(cfg.model.backbone, dict(type='LN'))
        cfg.model = dict(cfg.model, type='ReplacedNorms', of=cfg.model.type, norm_cfg=norm_cfg, converted=wanted)
    cfg.optim_wrapper.optimizer.lr = method.rate or load_config(
        str(ROOT / f'projects/digits/configs/swin_un_{TASKS[args.task]}.py')).optim_wrapper.optimizer.lr
    cfg.randomness = dict(seed=seed)
    # The same loop for both tasks, with validations.
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=steps, val_interval=steps // VALIDATIONS[args.task])
    cfg.log_processor = dict(by_epoch=False, window_size=20)
    cfg.default_hooks.checkpoint.update(by_epoch=False, interval=steps, max_keep_ckpts=1)
    cfg.param_scheduler[-1].end = steps
    return Config(cfg.to_dict())


class PerturbedModel:
    """A model with modified input images."""

    def __init__(self, model, change):
        self.model, self.change, self.rng = model, change, torch.Generator().manual_seed(0)

    def test_step(self, batch):
        images = [self.change(image.float(), self.rng).clamp(0, 255).round().to(image.dtype)
                    for image in batch['inputs']]
        return self.model.test_step({**batch, 'inputs': images})


def with_larger_images(cfg):
    """The config with larger images for the test."""
    cfg = copy.deepcopy(cfg)
    for transform in cfg.test_dataloader.dataset.pipeline:
        if transform.type == 'Resize':
            scale = transform.scale
            transform.scale = round(scale * SIZE_FACTOR) if isinstance(scale, int) else tuple(
                round(side * SIZE_FACTOR) for side in scale)
    return cfg


@torch.no_grad()
def metrics_of_run(run):
    """Metrics of a finished run, folded, and for some unfolded on modified images; cached in a file next to it."""
    file = run.work_dir / 'tested.json'
    if not file.exists():
        cfg = load_config(str(run.config))
        set_dataloader_defaults(cfg)
        model = build_model(cfg)
        load_weights(model, str(last_checkpoint(run.work_dir)))
        model.eval()
        metrics = {}
        if run.norm in PERTURBED:
            metrics = {name: main_metrics(test_metrics(cfg, PerturbedModel(model, change), name))
                       for name, change in PERTURBATIONS.items()}
            metrics['larger'] = main_metrics(test_metrics(with_larger_images(cfg), model, 'larger'))
        if any(isinstance(module, OfflineNorm) for module in model.modules()):
            fuse_norms(model)
            metrics['folded'] = main_metrics(test_metrics(cfg, model, 'folded'))
            metrics['norms left'] = sum(isinstance(module, (OfflineNorm, nn.LayerNorm)) for module in model.modules())
        write_text(file, json.dumps(metrics))
    return json.loads(file.read_text())


def cell(values, digits):
    values = [value for value in values if value is not None]
    if not values:
        return '-'
    spread = f' ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else ''
    return f'{statistics.mean(values):.{digits}f}{spread} ({", ".join(f"{value:.{digits}f}" for value in values)})'


def write_results(args, runs, starts):
    """Writes the table, the numbers and the figure of all finished runs."""
    rows, curves = [], {}
    for seed in range(args.seeds):
        for norm in ('LN', 'UN'):
            if result := ComparedRun(args.compared, norm, seed).result():
                rows += [(f'{norm}, from scratch', seed, 'trained', *item)
                         for item in main_metrics(result['metrics']).items()]
    for run in runs:
        rows += [(run.norm, run.seed, 'untrained', *item) for item in starts[run].items()]
        if not (result := run.result()):
            continue
        rows += [(run.norm, run.seed, 'trained', *item) for item in main_metrics(result['metrics']).items()]
        for condition, metrics in metrics_of_run(run).items():
            rows += [(run.norm, run.seed, condition, *item) for item in (
                metrics.items() if isinstance(metrics, dict) else [('norms', metrics)])]
        scalars = read_scalars(run.work_dir)
        curves.setdefault(run.norm, []).append({key: np.vstack([[0, value], scalars[key]])
                                                for key, value in starts[run].items()})
    write_csv(args.out / 'conversion.csv', ('way', 'seed', 'condition', 'metric', 'value'), rows)
    keys = list(dict.fromkeys(row[3] for row in rows if row[3] != 'norms'))
    conditions = ('untrained', 'trained', 'folded', *PERTURBATIONS, 'larger')
    lines = []
    for key in keys:
        digits = 3 if key.startswith('coco/') else 2
        lines += [*markdown_table([key, *conditions], (
            [method, *(cell([row[4] for row in rows if row[:1] + row[2:4] == (method, condition, key)], digits)
                       for condition in conditions)] for method in dict.fromkeys(row[0] for row in rows))), '']
    write_text(args.out / 'conversion.md', '\n'.join(lines))
    if curves:
        save(curves_figure({'': curves}, keys, f'From LayerNorm to UN: {args.task}'), args.out / 'conversion.png')
    return lines


@command
def main(argv=None):
    args = parse_args(argv)
    out_folder(args.out)
    configs, starts = {}, {}
    for seed in range(args.seeds):
        teacher = last_checkpoint(ComparedRun(args.compared, 'LN', seed).work_dir)
        for name in args.ways:
            run = ComparedRun(args.out, name, seed)
            weights, starts[run] = start_weights(args, METHODS[name], seed, teacher)
            configs[run] = recipe(args, METHODS[name], seed, teacher, weights)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pending = {run: cfg for run, cfg in configs.items() if run.result() is None}
    try:
        errors = train_all(pending, args.jobs, lambda errors: None)
    except KeyboardInterrupt:
        raise RunError('interrupted; run the same command to continue.') from None
    print('\n'.join(write_results(args, list(configs), starts)))
    if errors:
        raise RunError('\n'.join(f'{run}: {error}' for run, error in errors.items()))


if __name__ == '__main__':
    main()
