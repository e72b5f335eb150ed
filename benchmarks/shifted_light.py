"""Measures top-1 of trained classifiers on darker and brighter test images, and with lower and higher contrast.

    python benchmarks/shifted_light.py --models LN=LN_CONFIG:CHECKPOINT[:CHECKPOINT...] UN=UN_CONFIG:CHECKPOINT...

Several checkpoints of a model are its seeds.
"""
import argparse
import copy
import json
from pathlib import Path

from int8 import parse_model
from mmunorm.benchmark.environment import environment
from mmunorm.cli.arguments import command, load_config, set_dataloader_defaults
from mmunorm.deploy.openmmlab import loaded_model
from mmunorm.engine.calibration import test_metrics

import torch

ROOT = Path(__file__).parent.parent
LIGHT = {'as it is': {}, 'darker': dict(brightness=0.4), 'brighter': dict(brightness=1.8),
         'less contrast': dict(contrast=0.4), 'more contrast': dict(contrast=1.8)}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', required=True, type=parse_model,
                        metavar='NAME=CONFIG:CHECKPOINT...')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def shifted(cfg, factors):
    """The config with test images modified by these factors after loading."""
    cfg = copy.deepcopy(cfg)
    pipeline = cfg.test_dataloader.dataset.pipeline
    pipeline.insert(1, dict(type='ColorJitter', **{name: (factor, factor) for name, factor in factors.items()}))
    return cfg


@command
def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, config, checkpoints in args.models:
        cfg = load_config(config)
        set_dataloader_defaults(cfg)
        for seed, checkpoint in enumerate(checkpoints):
            model, _ = loaded_model(cfg, checkpoint)
            for form, factors in LIGHT.items():
                row = dict(model=name, seed=seed, form=form, metrics=test_metrics(shifted(cfg, factors), model, form),
                           environment=environment(torch.device('cpu')))
                print(name, seed, form, row['metrics'])
                with open(args.out / 'shifted_light.jsonl', 'a') as file:
                    print(json.dumps(row), file=file)


if __name__ == '__main__':
    main()
