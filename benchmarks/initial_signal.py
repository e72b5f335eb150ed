"""Draws the propagation of a signal with initial weights: E[y^2] through 100 layers, and the share of each branch.

    python benchmarks/initial_signal.py

Each panel but the last has layers of a linear map and an activation, for one initialization. The last has 100 residual
branches, random linear maps of their inputs, with PostNorm, PreNorm and the sum over sqrt(2): the correlation of each
branch's output with the end of the stream, and the theory of Su (kexue 8620). Writes docs/images/initial_signal.png.
"""
import argparse
from pathlib import Path

from mmunorm.cli.arguments import command, positive
from projects.deep.deep.init import ScaledActivation, keep_second_moment_, sample_
from projects.paper.paper.curves import COLOURS
from projects.paper.paper.figures import small_labels
from projects.paper.paper.layout import finish, new_panels, save, wrapped

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

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
    """A figure with a panel for each initialization, and one for the residual schemes."""
    figure, (*panels, last) = new_panels(4, 2)
    for axes, name in zip(panels, INITIALIZATIONS, strict=True):
        for i, activation in enumerate(ACTIVATIONS):
            values = moments(name, activation, args)
            if name.endswith('SELU'):  # in place of the activation
                axes.plot(values, color='black')
                print(f'{name}: {values[-1]:.3g}')
                break
            axes.plot(values, color=COLOURS[i + 3], label=activation)
            print(f'{name}, {activation}: {values[-1]:.3g}')
        axes.set(yscale='log', ylim=(1e-12, 1e12), yticks=(1e-10, 1e-5, 1, 1e5, 1e10))
        axes.set_title(wrapped(name, 1.7), fontsize='small')
        small_labels(axes, '', 'E[y$^2$]' if axes in panels[::2] else '')
    small_labels(panels[-1], 'layer', 'E[y$^2$]')
    layers = np.arange(1, args.layers + 1)
    halved, constant = 2.**((layers - args.layers - 1) / 2), np.full(args.layers, (args.layers + 1)**-0.5)
    for scheme, derived, colour in (('PostNorm', halved, '0.4'), ('ScaledResidual', halved, '0.75'),
                                    ('PreNorm', constant, 'black')):
        last.plot(layers, np.abs(weights(scheme, args)), '.', color=colour, markersize=3)
        last.plot(layers, derived, color=colour, linewidth=1)
    last.set(yscale='log', ylim=(1e-4, 1.5))
    for scheme, height, colour in (('PreNorm', 0.14, 'black'), ('PostNorm', 0.04, '0.4'),
                                  ('ScaledResidual', 2e-4, '0.6')):
        last.annotate(scheme, (2, height), fontsize='small', color=colour)
    last.set_title('residual branches: correlation\nwith the end of the stream', fontsize='small')
    small_labels(last, 'layer', '')
    finish(figure, 1.2, f'Initial weights, {args.layers} layers of width {args.width}')
    return figure


@command
def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(0)
    save(figure_of(args), args.out)
    print(f'written: {args.out}')


if __name__ == '__main__':
    main()
