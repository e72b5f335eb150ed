"""Trains a detector or a classifier."""
import argparse

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them
from mmunorm.engine import launch
from mmunorm.engine.preflight import check_data, check_pretrained


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='continue from a checkpoint, or from the latest one in the work directory')
    parser.add_argument(
        '--amp',
        action='store_true',
        help='mixed precision: float16 with a loss scale on a GPU, bfloat16 on a CPU')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the batch size')
    launch.add_runner_arguments(parser)
    return parser.parse_args(argv)


@launch.command
def main(argv=None):
    args = parse_args(argv)
    cfg = launch.load_config(args.config, args.cfg_options)
    launch.prepare(cfg, args)
    launch.set_resume(cfg, args.resume)
    launch.add_training_hooks(cfg)
    launch.keep_two_checkpoints(cfg)
    if args.amp:
        launch.enable_amp(cfg)
    if args.auto_scale_lr:
        launch.enable_auto_scale_lr(cfg)
    check_data(cfg, ['train', 'val'])
    check_pretrained(cfg, args.config)
    launch.train(launch.build_runner(cfg))


if __name__ == '__main__':
    main()
