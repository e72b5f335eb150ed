"""Trains a model from a config."""
import argparse
import os

from mmunorm.checkpoints.loading import check_checkpoint, load_weights, read_checkpoint
from mmunorm.cli import training
from mmunorm.cli.arguments import add_runner_arguments, apply_runner_arguments, command, load_config
from mmunorm.cli.data_checks import check_data
from mmunorm.config.models import clear_build_errors
from mmunorm.config.pretrained import pretrained_path
from mmunorm.config.starting import fit_load_from, fit_pretrained
from mmunorm.engine.runner import unwrapped_model
from mmunorm.utils import Interrupted, PreflightError, error_text

from mmengine.runner import Runner, find_latest_checkpoint


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('--resume', nargs='?', const='auto', metavar='CHECKPOINT',
                        help='continue from a checkpoint, or from the latest one in the work directory')
    parser.add_argument('--amp', action='store_true',
                        help='mixed precision on a GPU, float16 with a loss scale')
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate by the batch size')
    add_runner_arguments(parser)
    return parser.parse_args(argv)


def set_resume(cfg, resume):
    """Applies `--resume`: a checkpoint, 'auto' for the latest in the work directory, or None.

    A resumed run takes all its weights from the checkpoint, so that pretrained weights need not exist.
    """
    if resume == 'auto' or resume is None and cfg.get('resume') and cfg.get('load_from') is None:
        latest = find_latest_checkpoint(cfg.work_dir)
        cfg.resume, cfg.load_from = latest is not None, latest or cfg.get('load_from')
    elif resume is not None:
        cfg.resume, cfg.load_from = True, resume
    source = cfg.get('load_from')
    if source is not None:
        check_checkpoint(source, folder='runner_type' in cfg)  # as sharded training writes them
    if cfg.get('resume') and pretrained_path(cfg) is not None:
        cfg.model.backbone.init_cfg = None
    if cfg.get('resume') and os.path.isfile(source):
        read_checkpoint(source)  # refuses code, before a run writes anything


def enable_auto_scale_lr(cfg):
    """Turns on scaling of the learning rate by the batch size."""
    if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
        raise PreflightError('--auto-scale-lr needs `auto_scale_lr=dict(base_batch_size=...)` in the config: '
                             'the total batch size that its learning rate is for.')
    cfg.auto_scale_lr.enable = True


def train(runner):
    """Trains, and calls `flush(runner)` of each hook that has it when an error or Ctrl-C ends the run.

    So a hook writes what it holds. mmengine calls `after_train` only when a run ends normally.
    """
    if isinstance(runner, Runner):
        with clear_build_errors():  # in the order of Runner.train, which draws the same random numbers then
            _ = runner.train_loop
            runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
            _ = runner.val_loop
    training.log_summary(runner)
    try:
        runner.train()
    except BaseException as error:
        for hook in runner.hooks:
            if hasattr(hook, 'flush'):
                try:
                    hook.flush(runner)
                except Exception as problem:  # must not hide what ended the run
                    runner.logger.warning(f'{type(hook).__name__} could not write its data: {error_text(problem)}')
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(f'interrupted after step {runner.iter}; --resume goes on from the last checkpoint in '
                              f'{runner.work_dir}, if there is one.') from None
        raise


@command
def main(argv=None):
    args = parse_args(argv)
    cfg = load_config(args.config, args.cfg_options, args.norm)
    apply_runner_arguments(cfg, args)
    set_resume(cfg, args.resume)
    training.add_hooks(cfg, 'OfflineNormHook', 'ResidualHook')
    if args.amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        enable_auto_scale_lr(cfg)
    check_data(cfg, ['train', 'val'])
    fit_pretrained(cfg)
    fit_load_from(cfg)
    runner = training.build_runner(cfg)
    if isinstance(runner, Runner) and cfg.get('resume'):  # mmengine would take a checkpoint of another model
        load_weights(unwrapped_model(runner), cfg.load_from)
    train(runner)


if __name__ == '__main__':
    main()
