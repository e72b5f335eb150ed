"""Trains one recipe at several depths, with several residual schemes and norms; writes a table and a figure.

To continue after an interruption, run the same command again: finished runs are skipped, others resume from their last
checkpoint. FAIL marks a diverged run, as in compare_norms.py. The results are OUT/depths.md, .csv and .png.
"""
import argparse
import shlex
import statistics
import sys
from functools import partial

from mmunorm.cli.arguments import command, load_config, positive
from mmunorm.cli.data_checks import check_data
from mmunorm.config.models import build_model
from mmunorm.config.presets import HELP, count_steps
from mmunorm.tables import markdown_table
from mmunorm.utils import PreflightError
from projects.deep.deep.figures import Quality, quality_figure
from projects.deep.deep.residuals import RESIDUALS
from projects.paper.paper.comparing import (
    add_comparison_arguments,
    check_initial_weights,
    check_settings,
    parse_presets,
    seeded,
    train_and_write,
    with_norm,
)
from projects.paper.paper.results import metrics_of, result_notes, results_of, summary, write_files
from projects.paper.paper.runs import FAIL, FINISHED, ComparedRun

from mmengine.config import Config


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config of a Vision Transformer or a Transformer of translation with UN; its '
                        'norm_cfg, residual_cfg and numbers of layers are replaced')
    parser.add_argument('--residuals', nargs='+', required=True, metavar='SCHEME',
                        help=f'{", ".join(sorted(RESIDUALS.module_dict))}, or NAME=TYPE,argument=value,...')
    parser.add_argument('--norms', nargs='+', default=['LN', 'UN'], metavar='NORM', help=f'default: LN UN; {HELP}')
    parser.add_argument('--depths', nargs='+', type=positive, default=[12, 24, 48, 96], metavar='LAYERS',
                        help='of the network, and of encoder and decoder each (default: 12 24 48 96)')
    add_comparison_arguments(parser)
    args = parser.parse_args(argv)
    if len(set(args.depths)) < len(args.depths):
        parser.error('--depths names one twice')
    return args


# The names of the numbers of layers in an arch.
LAYERS = ('num_layers', 'encoder_layers', 'decoder_layers')


def set_depth(cfg, depth):
    """Sets the number of layers of the network, or of both encoder and decoder, in place."""
    arch = cfg.model.backbone.arch
    arch.update({name: depth for name in LAYERS if name in arch})


def label(scheme, norm, depth):
    return f'{scheme} {norm} {depth}'


def plan(args):
    """The config of every run: seed by seed, so that a partial table covers all kinds, and shallow models first."""
    base = load_config(args.config, args.cfg_options)
    arch = (base.model.get('backbone') or {}).get('arch')
    if not isinstance(arch, dict) or not arch.keys() & set(LAYERS) or 'residual_cfg' not in base.model.backbone:
        raise PreflightError(f'{args.config} has no model.backbone.arch with {" or ".join(LAYERS)}, or no '
                             'model.backbone.residual_cfg, to replace; use a recipe such as '
                             'projects/deep/configs/vit_un_classifier.py.')
    check_initial_weights(base, args.config, args.cfg_options)
    check_data(base, ['train', 'val'])
    known = {name: dict(type=name) for name in sorted(RESIDUALS.module_dict)}
    schemes = parse_presets('--residuals', args.residuals, known, 'scheme')
    steps = count_steps(base)
    recipes = {}
    for norm, norm_cfg in parse_presets('--norms', args.norms).items():
        norm_base = with_norm(base, norm, norm_cfg, steps)
        for scheme, residual_cfg in schemes.items():
            recipes[scheme, norm] = cfg = Config(norm_base.to_dict())
            cfg.model.backbone.residual_cfg = residual_cfg
            set_depth(cfg, min(args.depths))
            build_model(cfg)  # an invalid combination fails before the first run
    configs = {}
    for seed in range(args.seeds):
        for depth in args.depths:
            for (scheme, norm), recipe in recipes.items():
                run = ComparedRun(args.out, label(scheme, norm, depth), seed)
                configs[run] = seeded(recipe, run, args)
                set_depth(configs[run], depth)
    return configs, list(recipes)


def write(errors, args, runs, kinds):
    """Writes the table, the numbers and the figure of the runs so far."""
    results = results_of(runs, errors)
    metric = next(iter(metrics_of(results)), '')
    cells = {kind: {depth: [results[ComparedRun(args.out, label(*kind, depth), seed)] for seed in range(args.seeds)]
                    for depth in args.depths} for kind in kinds}
    lines = [f'# Depths compared: {args.config}', '', f'`{shlex.join(["python", *args.command])}`', '',
             f'{metric} of the last validation; {args.seeds} seed(s); std is the sample standard deviation.', '',
             *markdown_table(['scheme', 'norm', *(f'{depth} layers' for depth in args.depths)], (
                 [*kind, *(summary(results, metric) + steps_of(results) for results in by_depth.values())]
                 for kind, by_depth in cells.items()))]
    rows = [(*kind, depth, seed, result['status'], result['step'], result['metrics'].get(metric, ''))
            for kind, by_depth in cells.items() for depth, seeds in by_depth.items()
            for seed, result in enumerate(seeds) if result['status'] in (FINISHED, FAIL)]
    quality = {kind: {depth: quality_of(seeds, metric) for depth, seeds in by_depth.items()}
               for kind, by_depth in cells.items()}
    return write_files(args.out, 'depths', [*lines, '', *result_notes(results)],
                       ('scheme', 'norm', 'layers', 'seed', 'status', 'step', metric), rows,
                       quality_figure(quality, metric))


def quality_of(results, metric):
    values = [result['metrics'][metric] for result in results if metric in result['metrics']]
    return Quality(statistics.mean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None,
                   sum(result['status'] == FAIL for result in results))


def steps_of(results):
    steps = [str(result['step']) for result in results if result['status'] == FAIL]
    return f' at step {", ".join(steps)}' if steps else ''


@command
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    args.command = ['projects/deep/tools/compare_depths.py', *argv]
    configs, kinds = plan(args)
    check_settings(configs)
    train_and_write(configs, args, partial(write, args=args, runs=list(configs), kinds=kinds))


if __name__ == '__main__':
    main()
