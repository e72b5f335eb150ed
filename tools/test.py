"""Evaluates a trained model and prints its metrics."""
import argparse
import copy
import functools

from mmunorm.checkpoints.folded import save_folded
from mmunorm.checkpoints.loading import check_checkpoint, load_weights
from mmunorm.cli import training
from mmunorm.cli.arguments import add_runner_arguments, apply_runner_arguments, command, load_config, out_file
from mmunorm.cli.data_checks import check_data, class_name
from mmunorm.config.models import clear_build_errors, match_folded
from mmunorm.config.starting import fit_load_from
from mmunorm.engine import FuseNormsHook
from mmunorm.engine.runner import unwrapped_model
from mmunorm.utils import PreflightError, is_first_process, whole_file

import mmengine
from mmengine.registry import METRICS


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--fuse', action='store_true',
                        help='fold the norms of the model first: of LayerNorms the weights')
    parser.add_argument('--save', metavar='FILE', help='with --fuse: write the folded checkpoint to this file')
    parser.add_argument('--out', help='write the predictions to this pickle file (.pkl)')
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', help='write images with predictions to this folder')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds for which --show shows an image')
    add_runner_arguments(parser)
    args = parser.parse_args(argv)
    if args.out and not args.out.endswith(('.pkl', '.pickle')):
        parser.error(f'--out takes a .pkl file, got {args.out}')
    if args.save and not args.fuse:
        parser.error('--save writes a folded checkpoint: add --fuse')
    return args


def enable_drawing(cfg, args):
    """Applies --show and --show-dir to the visualization hook of mmdet or of mmpretrain."""
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        raise PreflightError('--show and --show-dir need a `visualization` hook in `default_hooks`.')
    if cfg.get('default_scope') == 'mmdet':
        settings = dict(draw=True, test_out_dir=args.show_dir)
    else:
        settings = dict(enable=True, out_dir=args.show_dir, interval=1)
    hook.update(settings, show=args.show, wait_time=args.wait_time)


def save_predictions(path, predictions):
    """Writes the file of --out atomically; used as a metric without values."""
    with whole_file(path) as part:
        mmengine.dump(predictions, part)
    print(f'{path} has the predictions.')
    return {}


def save_fused(runner, cfg, path):
    """Writes the file of --save."""
    hook = next(hook for hook in runner.hooks if isinstance(hook, FuseNormsHook))
    if not hook.report.folded + hook.report.reduced:
        raise PreflightError(f'--save {path}: no norm could be folded.\n{hook.report}')
    save_folded(unwrapped_model(runner), path, cfg, hook.report, hook.meta)
    print(f'{path} has the folded model.')


@command
def main(argv=None):
    args = parse_args(argv)
    cfg = load_config(args.config, args.cfg_options, args.norm)
    plain = copy.deepcopy(cfg)
    apply_runner_arguments(cfg, args)
    check_checkpoint(args.checkpoint)
    cfg.load_from = args.checkpoint
    if args.show or args.show_dir:
        enable_drawing(cfg, args)
    training.add_hooks(cfg, 'OfflineNormHook')
    if args.fuse:
        # A checkpoint already has the averaged weights; EMAHook would replace them by its own, which are not folded.
        cfg.custom_hooks = [hook for hook in cfg.custom_hooks if not class_name(hook).endswith('EMAHook')]
        training.add_hooks(cfg, 'FuseNormsHook')
    check_data(cfg, ['test'])
    match_folded(cfg, args.checkpoint)
    fit_load_from(cfg)
    if args.out:
        out_file(args.out, '--out', args.checkpoint)
    if args.save:
        out_file(args.save, '--save', args.checkpoint)
    runner = training.build_runner(cfg)
    load_weights(unwrapped_model(runner), args.checkpoint)  # mmengine would accept one of another model
    with clear_build_errors():
        _ = runner.test_loop
    if args.out:
        dump = 'mmdet.DumpDetResults' if cfg.get('default_scope') == 'mmdet' else 'DumpResults'
        metric = METRICS.build(dict(type=dump, out_file_path=args.out))
        metric.compute_metrics = functools.partial(save_predictions, args.out)
        runner.test_evaluator.metrics.append(metric)
    training.log_summary(runner)
    metrics = runner.test()
    if args.save and is_first_process():
        save_fused(runner, plain, args.save)
    return metrics


if __name__ == '__main__':
    main()
