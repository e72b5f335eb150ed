"""Evaluates an exported model with the metrics of a config."""
import argparse
import json
import time
from pathlib import Path

from mmunorm.cli.arguments import (
    add_config_arguments,
    command,
    load_config,
    out_folder,
    set_dataloader_defaults,
    threads,
)
from mmunorm.cli.data_checks import check_data
from mmunorm.config.models import load_model
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.deploy.tasks.features import WithRest
from mmunorm.engine.calibration import test_metrics
from mmunorm.utils import PreflightError, write_text


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file of the data and the metrics')
    parser.add_argument('file', help='a file from tools/deploy/export.py')
    parser.add_argument('--checkpoint', help='of a file with a backbone alone: the model whose rest runs in torch')
    parser.add_argument('--work-dir', type=Path, help='folder for the metrics as JSON, as tools/test.py writes them')
    parser.add_argument('--threads', type=threads, help="threads of the CPU (default: the runtime's choice)")
    add_config_arguments(parser, norm=False)
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    cfg = load_config(args.config, args.cfg_options)
    check_data(cfg, ['test'])
    set_dataloader_defaults(cfg)
    if args.work_dir:
        out_folder(args.work_dir, '--work-dir')
    model = ExportedModel(args.file, args.threads)
    if (model.meta['task'] == 'features') != bool(args.checkpoint):
        raise PreflightError(f'--checkpoint is for files of --parts backbone, and {args.file} has '
                             f'{"one: name its model" if not args.checkpoint else "a whole model"}.')
    if args.checkpoint:
        model = WithRest(model, load_model(cfg, args.checkpoint))
    metrics = test_metrics(cfg, model, 'testing')
    for name, value in metrics.items():
        print(f'{name}: {value:.4f}')
    if args.work_dir:
        stamp = time.strftime('%Y%m%d_%H%M%S')
        folder = args.work_dir / stamp
        folder.mkdir(exist_ok=True)
        write_text(folder / f'{stamp}.json', json.dumps(metrics))
    return metrics


if __name__ == '__main__':
    main()
