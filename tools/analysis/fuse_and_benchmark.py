"""Folds the norms of a model and compares its speed and memory with LN and with no norm."""
import argparse
from pathlib import Path

from mmunorm.benchmark.folding import Settings, markdown, run_benchmark
from mmunorm.benchmark.output import write_results
from mmunorm.cli.arguments import (
    add_config_arguments,
    add_device_argument,
    command,
    load_config,
    out_file,
    out_folder,
    positive,
    threads,
)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file of a model with an offline norm')
    parser.add_argument('checkpoint', nargs='?', help='checkpoint file (default: random weights)')
    parser.add_argument('--out', help='folder of the results (default: work_dirs/CONFIG/fuse_and_benchmark)')
    parser.add_argument('--preset', choices=['paper'],
                        help='batch 512 at 224 x 224, or 2 at 1333 x 800 for detectors; 1000 batches. Other '
                        'options override it')
    parser.add_argument('--batch-size', type=positive,
                        help='images in a batch (the default depends on task and device)')
    parser.add_argument('--shape', type=positive, nargs='+', metavar='N',
                        help='height and width of the images, or one number for both')
    add_device_argument(parser)
    parser.add_argument('--amp', choices=['fp16', 'bf16'], help='run under autocast')
    parser.add_argument('--compile', action='store_true', help='use torch.compile')
    parser.add_argument('--warmup', type=positive,
                        help='rounds that are not counted (default 1, with --compile 2, on a GPU 10)')
    parser.add_argument('--repeat', type=positive,
                        help='rounds that are counted, with one batch of each row (default: as many as fit in 45 s)')
    parser.add_argument('--threads', type=threads, help="threads of the CPU (default: torch's choice)")
    parser.add_argument('--save', metavar='FILE', help='write the folded checkpoint to this file')
    add_config_arguments(parser)
    args = parser.parse_args(argv)
    if args.save and not args.checkpoint:
        parser.error('--save needs a CHECKPOINT to fold, not random weights')
    if args.shape is not None:
        if len(args.shape) > 2:
            parser.error(f'--shape takes one or two numbers, got {len(args.shape)}')
        args.shape = (args.shape[0], args.shape[-1])
    return args


@command
def main(argv=None):
    args = parse_args(argv)
    cfg = load_config(args.config, args.cfg_options, args.norm)
    chosen = {name: getattr(args, name) for name in (
        'batch_size', 'shape', 'device', 'amp', 'compile', 'warmup', 'repeat', 'threads')}
    settings = Settings.of_the_paper(cfg, **chosen) if args.preset else Settings(**chosen)
    work_dir = Path(cfg.get('work_dir') or Path('work_dirs', Path(args.config).stem))
    out = out_folder(args.out or work_dir / 'fuse_and_benchmark')
    if args.save:
        out_file(args.save, '--save', args.checkpoint)
    result = run_benchmark(cfg, settings, args.checkpoint, title=work_dir.name, save=args.save)
    write_results(result, markdown(result), out, 'benchmark')
    if args.save:
        print(f'written: {args.save}')
    return result


if __name__ == '__main__':
    main()
