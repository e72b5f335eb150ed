"""Draws the first steps and the layer statistics of several deep models as depth.png.

It shows loss and gradient norm over the first steps, and by layer the gradient norm, 1 minus the cosine similarity to
the layer before, and the share of active values after the FFN's activation. Writes all numbers to depth.csv, and a
table to depth.md with a row per run: layers, residual scheme, norm, the largest gradient norm at the start, the last
loss, and the best metric. Train with `custom_hooks=[dict(type='LayerStatisticsHook')]` first."""
import argparse

from mmunorm.cli.arguments import command, out_folder, positive
from mmunorm.utils import write_text
from projects.deep.deep.figures import depth_figure
from projects.deep.deep.layer_statistics import MEASURES, read_layers
from projects.paper.paper.curves import METRICS
from projects.paper.paper.layout import save
from projects.paper.paper.measures import write_csv
from projects.paper.paper.work_dirs import read_work_dirs

import numpy as np
from mmengine.config import Config


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('work_dir', nargs='+', help='work directories of training runs')
    parser.add_argument('--out', required=True, help='folder for the figure and the numbers')
    parser.add_argument('--steps', type=positive, default=100, help='number of first steps (default 100)')
    return parser.parse_args(argv)


def backbone_of(run):
    """The config of a run's backbone; empty if its folder has no config."""
    try:
        return Config.fromfile(run.folder / run.config_name).model.backbone
    except (OSError, SyntaxError, AttributeError):
        return {}


def table_row(run, layers, steps):
    """A run as a row of depth.md."""
    backbone = backbone_of(run)
    scheme, norm = (backbone.get(key, {}).get('type', '') for key in ('residual_cfg', 'norm_cfg'))
    start = np.sqrt(np.square(layers.values['gradient'][layers.steps <= steps]).sum(axis=1))
    loss = run.scalars['loss'][-1, 1] if 'loss' in run.scalars else np.nan
    best = next((f'{METRICS[name]} {found[1]:.2f}' for name in METRICS if (found := run.last_and_best(name))), '')
    largest = f'{start.max():.3g}' if len(start) else ''
    cells = run.name, len(layers.layers), scheme, norm, largest, run.last_step, f'{loss:.4g}', best
    return f'| {" | ".join(map(str, cells))} |'


@command
def main(argv=None):
    args = parse_args(argv)
    runs = read_work_dirs(args.work_dir)
    records = [read_layers(run.folder) for run in runs]
    out = out_folder(args.out)
    write_csv(out / 'depth.csv', ('run', 'layer', 'step', *MEASURES),
              ((run.name, layer, step, *(record.values[field][i, j] for field in MEASURES))
               for run, record in zip(runs, records, strict=True) for i, step in enumerate(record.steps)
               for j, layer in enumerate(record.layers)))
    header = ['| run | layers | scheme | norm | largest gradient norm at the start | last step | its loss | best |',
              '|---|---|---|---|---|---|---|---|']
    rows = [table_row(run, record, args.steps) for run, record in zip(runs, records, strict=True)]
    write_text(out / 'depth.md', '\n'.join([*header, *rows]) + '\n')
    measured = {run.name: (run.scalars, record) for run, record in zip(runs, records, strict=True)}
    save(depth_figure(measured, args.steps), out / 'depth.png')
    print('\n'.join([*header, *rows]))
    print(f'written: depth.md, depth.csv and depth.png in {out}')


if __name__ == '__main__':
    main()
