"""Trains one recipe with several norms and seeds; writes one table, one CSV and one image of the curves.

To continue after an interruption, run the same command again: finished runs are skipped, others resume from their last
checkpoint. A run that crashes is an error; the next call retries it.

FAIL marks a run that diverged and was stopped: it had --fail-patience consecutive bad steps, or non-finite weights. A
step is bad if its loss is not finite, or exceeds --fail-factor times the initial loss.

The results are OUT/comparison.md, .csv and .png; with --stress, they are OUT/stress.md, .csv and .png. They
cover only the norms and seeds that the command names.
"""
import argparse
import shlex
import sys

from mmunorm.cli.arguments import command, load_config, non_negative
from mmunorm.cli.data_checks import check_data, class_name
from mmunorm.config.models import build_model
from mmunorm.config.presets import HELP, NORMS, count_steps, slug
from mmunorm.config.pretrained import pretrained_path, set_pretrained
from mmunorm.utils import PreflightError
from projects.paper.paper.comparing import (
    add_comparison_arguments,
    check_initial_weights,
    check_settings,
    checked_hook,
    parse_presets,
    seeded,
    train_and_write,
    with_norm,
)
from projects.paper.paper.results import write_norms
from projects.paper.paper.runs import BASELINE, STRESSED, ComparedRun
from projects.paper.paper.training import missing_weights

from mmengine.registry import MODELS


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'config',
        help='config of the recipe, with UN; the norm_cfg of its backbone is replaced. Every UN gets its '
        'arguments, and every norm with a warm-up gets its warmup_iters. PRepBN fades LayerNorm out over half '
        'of the run')
    parser.add_argument(
        '--norms', nargs='+', required=True, metavar='NORM',
        help=f'{HELP}; or PRepBN')
    parser.add_argument(
        '--pretrained', metavar='PATTERN',
        help="path of the pretrained backbone weights. {norm} is the name of the norm's folder, {seed} the seed, e.g. "
        '"OUT/{norm}/seed_{seed}/epoch_8.pth". Without it, every backbone is trained from scratch')
    stress = parser.add_argument_group('stress')
    stress.add_argument(
        '--stress', action='store_true',
        help='for detectors and classifiers: train all norms a second time with a higher learning rate and perturbed '
        'inputs. In a share of the steps, the same for all norms, the inputs are multiplied by a log-uniform factor')
    stress.add_argument('--stress-probability', type=float, default=0.02,
                        help='share of the steps (default 0.02)')
    stress.add_argument('--stress-scale', type=float, nargs=2, default=(2.0, 30.0),
                        metavar=('LEAST', 'GREATEST'), help='range of the factor (default 2 30)')
    stress.add_argument('--stress-lr', type=float, default=1.5,
                        help='factor for the learning rate (default 1.5)')
    parser.add_argument('--first-seed', type=non_negative, default=0, help='the first of the --seeds (default 0)')
    add_comparison_arguments(parser)
    return parser.parse_args(argv)


def plan(args):
    """The config of every run in running order: seed by seed, so that a partial table covers all norms."""
    base = load_config(args.config, args.cfg_options)
    if 'norm_cfg' not in (base.model.get('backbone') or {}):
        raise PreflightError(f'{args.config} has no model.backbone.norm_cfg to replace.')
    check_initial_weights(base, args.config, args.cfg_options)
    if args.stress and learning_rate(base) is None:
        raise PreflightError(f'--stress raises optim_wrapper.optimizer.lr, which {args.config} does not set.')
    # A model whose inputs must not be multiplied declares its inputs.
    if args.stress and (inputs := getattr(MODELS.get(class_name(base.model)), 'stress_obstacle', None)):
        raise PreflightError(f'--stress multiplies normalized images by a factor, and {base.model.type} reads '
                             f'{inputs}.')
    check_data(base, ['train', 'val'])
    steps = count_steps(base)
    presets = {**NORMS, 'PRepBN': dict(type='PRepBN', steps=max(1, steps // 2))}
    recipes = {name: with_norm(base, name, norm_cfg, steps)
               for name, norm_cfg in parse_presets('--norms', args.norms, presets).items()}
    for recipe in recipes.values():
        build_model(recipe)  # an invalid config fails before the first run
    configs = {}
    for condition in (BASELINE, STRESSED) if args.stress else (BASELINE, ):
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for name, recipe in recipes.items():
                run = ComparedRun(args.out, name, seed, condition)
                configs[run] = make_config(recipe, run, args)
    return configs


def learning_rate(cfg):
    """The learning rate of a config with one optimizer that sets it, else None."""
    return ((cfg.get('optim_wrapper') or {}).get('optimizer') or {}).get('lr')


def make_config(recipe, run, args):
    cfg = seeded(recipe, run, args)
    if run.condition == STRESSED:
        # All norms get the same perturbation for the same seed.
        cfg.custom_hooks.append(checked_hook(
            '--stress-probability and --stress-scale', type='InputStressHook', probability=args.stress_probability,
            scale=tuple(args.stress_scale), seed=run.seed))
        cfg.optim_wrapper.optimizer.lr *= args.stress_lr
    if args.pretrained:
        try:
            path = args.pretrained.format(norm=slug(run.norm), seed=run.seed)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            raise PreflightError('--pretrained may contain {norm} and {seed}, but no other braces, got '
                                 f'{args.pretrained!r}.') from None
        set_pretrained(cfg, path)
    elif pretrained_path(cfg) is not None:
        set_pretrained(cfg, None)
    return cfg


def header_of(args, configs):
    """The header of the results."""
    rate = learning_rate(next(iter(configs.values())))
    lines = [f'# Norms compared: {args.config}', '', f'`{shlex.join(["python", *args.command])}`', '',
             f'Metrics of the last validation; {args.seeds} seed(s); '
             + ('' if rate is None else f'learning rate {rate:g}; ') +
             'std is the sample standard deviation. A step is bad if its loss is not finite, or is more than '
             f'{args.fail_factor:g} times the initial loss. FAIL is a run with {args.fail_patience} bad steps in a '
             'row, or with weights that are not finite.']
    if args.stress:
        low, high = args.stress_scale
        lines.append(
            f'Stressed: learning rate times {args.stress_lr:g}; with probability '
            f'{args.stress_probability:g} the inputs of a step are multiplied by a factor. Its logarithm is '
            f'uniform between those of {low:g} and {high:g}. Every norm has the same disturbed steps.')
    if args.pretrained:
        lines.append(f'Backbones start from `{args.pretrained}`.')
    settings = {run.norm: dict(cfg.model.backbone.norm_cfg) for run, cfg in configs.items()}
    lines += ['', *(f'- {norm}: `{norm_cfg}`' for norm, norm_cfg in settings.items())]
    return '\n'.join(lines)


@command
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    args.command = ['projects/paper/tools/compare_norms.py', *argv]
    configs = plan(args)
    check_settings(configs)
    if args.pretrained and all(missing_weights(cfg) for cfg in configs.values()):
        raise PreflightError(f'--pretrained: {missing_weights(next(iter(configs.values())))}, and no other '
                             'run has its weights.')
    header = header_of(args, configs)
    name = 'stress' if args.stress else 'comparison'

    def write(errors):
        return write_norms(args.out, name, list(configs), errors, header, args.config)

    train_and_write(configs, args, write)


if __name__ == '__main__':
    main()
