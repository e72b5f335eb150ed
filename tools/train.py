"""Trains a model from a config."""
import argparse

from mmunorm.cli import training
from mmunorm.cli.arguments import add_runner_arguments, apply_runner_arguments, command, load_config
from mmunorm.cli.data_checks import check_data
from mmunorm.config.starting import fit_load_from, fit_pretrained


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


@command
def main(argv=None):
    args = parse_args(argv)
    cfg = load_config(args.config, args.cfg_options, args.norm)
    apply_runner_arguments(cfg, args)
    training.set_resume(cfg, args.resume)
    training.add_hooks(cfg, 'OfflineNormHook', 'ResidualHook')
    if args.amp:
        training.enable_amp(cfg)
    if args.auto_scale_lr:
        training.enable_auto_scale_lr(cfg)
    check_data(cfg, ['train', 'val'])
    fit_pretrained(cfg)
    fit_load_from(cfg)
    runner = training.build_runner(cfg)
    training.load_resumed(runner)
    training.train(runner)


if __name__ == '__main__':
    main()
