"""Draws the propagation of a signal with initial weights: E[y^2] through 100 layers, and the share of each branch.

    python benchmarks/initial_signal.py

The first panels have layers of a linear map and an activation, for each initialization. The last has 100 residual
branches, random linear maps of their inputs, with PostNorm, PreNorm and the sum over sqrt(2): the correlation of each
branch's output with the end of the stream, and the theory of Su (kexue 8620). Writes docs/images/initial_signal.png.
"""
import argparse
from pathlib import Path

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from mmunorm.analysis.curves import COLOURS, LINES
from mmunorm.analysis.layout import finish, save
from mmunorm.cli.arguments import command, positive
from mmunorm.init import ScaledActivation, keep_second_moment_, sample_

ACTIVATIONS = ('ReLU', 'GELU', 'SiLU')
INITIALIZATIONS = {
    "torch's own": lambda weight: nn.init.kaiming_uniform_(weight, 5**0.5),
    'truncated normal, 0.02': lambda weight: sample_(weight, 0.02, 'truncated'),
    'Xavier': lambda weight: keep_second_moment_(weight, mode='fan_avg'),
    'He': lambda weight: keep_second_moment_(weight, 'ReLU'),
    "SecondMoment, the activation's gain": None,
    'SecondMoment, ScaledActivation': keep_second_moment_,
    'SecondMoment, SELU': keep_second_moment_,
}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--layers', type=positive, default=100)
    parser.add_argument('--width', type=positive, default=512)
    parser.add_argument('--samples', type=positive, default=256)
    parser.add_argument('--out', type=Path, default=Path(__file__).parent.parent / 'docs/images/initial_signal.png')
    return parser.parse_args(argv)


def moments(name, activation, args):
    """E[y^2] after each layer; 1 before the first."""
    x = torch.randn(args.samples, args.width)
    function = dict(ScaledActivation=ScaledActivation(activation), SELU=F.selu).get(
        name.rpartition(', ')[2], getattr(F, activation.lower()))
    draw = INITIALIZATIONS[name] or (lambda weight: keep_second_moment_(weight, activation))
    values = [x.square().mean().item()]
    for _ in range(args.layers):
        x = function(x @ draw(torch.empty(args.width, args.width)).T)
        values.append(x.square().mean().item())
    return values


def weights(scheme, args):
    """Correlation of each branch's output with the end of the stream."""
    x = F.layer_norm(torch.randn(args.samples, args.width), (args.width, ))
    branches = []
    for _ in range(args.layers):
        read = F.layer_norm(x, (args.width, )) if scheme == 'PreNorm' else x
        branches.append(read @ keep_second_moment_(torch.empty(args.width, args.width)).T)
        x = x + branches[-1]
        if scheme == 'PostNorm':
            x = F.layer_norm(x, (args.width, ))
        if scheme == 'ScaledResidual':
            x = x / 2**0.5
    return [F.cosine_similarity(branch.flatten(), x.flatten(), 0).item() for branch in branches]


def figure_of(args):
    """A figure with a panel for each activation, and one for the residual schemes."""
    figure = Figure(figsize=(8, 4), layout='constrained')
    *panels, last = figure.subplots(2, 2).flat
    for axes, activation in zip(panels, ACTIVATIONS, strict=True):
        for i, name in enumerate(INITIALIZATIONS):
            axes.plot(moments(name, activation, args), LINES[i // len(COLOURS)], color=COLOURS[i % len(COLOURS)],
                      label=name)
        axes.set(title=activation, xlabel='layer', ylabel='E[y$^2$]', yscale='log', ylim=(1e-12, 1e6))
        axes.grid(alpha=0.3)
    back = np.arange(args.layers, 0, -1)  # from the branch's own layer to the end
    theory = dict(PostNorm=2.**(-back / 2), PreNorm=np.full(args.layers, (args.layers + 1)**-0.5),
                  ScaledResidual=2.**(-back / 2))
    for i, (scheme, expected) in enumerate(theory.items()):
        last.plot(range(1, args.layers + 1), np.abs(weights(scheme, args)), '.', color=COLOURS[i + 3],
                  label=f'{scheme}, measured')
        last.plot(range(1, args.layers + 1), expected, '-' if i < 2 else ':', color=COLOURS[i + 3],
                  label=f'{scheme}, derived')
    last.set(title='what is left of a branch', xlabel='layer', ylabel='correlation with the end', yscale='log',
             ylim=(1e-4, 1))
    last.grid(alpha=0.3)
    finish(figure, 2.4, f'Initial weights: {args.layers} layers of width {args.width}')
    return figure


@command
def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(0)
    for name in INITIALIZATIONS:
        last = {activation: moments(name, activation, args)[-1] for activation in ACTIVATIONS}
        print(f'{name}: ' + ', '.join(f'{activation} {value:.3g}' for activation, value in last.items()))
    save(figure_of(args), args.out)
    print(f'written: {args.out}')


if __name__ == '__main__':
    main()
