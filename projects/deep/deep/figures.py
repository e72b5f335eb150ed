"""Figures of the first steps of deep models, and of quality against depth."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from mmunorm.analysis.curves import COLOURS, LINES, Scalars, metric_label
from mmunorm.analysis.figures import small_labels
from mmunorm.analysis.layout import finish, new_panels

from .layer_statistics import LayerRecord


def depth_figure(runs: Mapping[str, tuple[Scalars, LayerRecord]], steps: int) -> Figure:
    """The first `steps` steps of runs, and statistics of their layers (Figures 3, 8 and 9 of arXiv 2305.02790)."""
    figure, panels = new_panels(5)
    loss, gradient, by_layer, distance, active = panels
    for i, (name, (scalars, layers)) in enumerate(runs.items()):
        style = dict(color=COLOURS[i % len(COLOURS)], linestyle=LINES[i // len(COLOURS) % len(LINES)], linewidth=1.2)
        curve = scalars.get('loss', np.empty((0, 2)))
        loss.plot(*curve[curve[:, 0] <= steps].T, label=name, **style)
        early = layers.steps <= steps
        squares = np.square(layers.values['gradient'])
        gradient.plot(layers.steps[early], np.sqrt(squares[early].sum(axis=1)), **style)
        numbers = np.arange(1, len(layers.layers) + 1)
        # A head with zero initial weights passes no gradient in the first step.
        first = layers.values['gradient'].any(axis=1).argmax()
        by_layer.plot(numbers, layers.values['gradient'][first], **style)
        distance.plot(numbers, 1 - layers.values['cosine'][-1], **style)
        active.plot(numbers, 100 * layers.values['active'][-1], **style)
    for axes in (gradient, by_layer, distance):
        axes.set_yscale('log', nonpositive='mask')
    step, layer = 'training step', 'layer, from input to output'
    for axes, x, y in ((loss, step, 'loss'), (gradient, step, 'gradient norm'),
                       (by_layer, layer, 'gradient norm, first\nstep that has one'),
                       (distance, layer, '1 - cosine to the\nlayer before, last step'),
                       (active, layer, 'active after the\nactivation (%)')):
        small_labels(axes, x, y)
    finish(figure, 1.3, 'How deep models begin, and what their layers do')
    return figure


def quality_figure(results: Mapping[str, Mapping[int, Sequence[float | None]]], metric: str) -> Figure:
    """A metric against depth, one line per kind of model: the mean over seeds, with a band from minimum to maximum.

    `results` has the metric of each seed by kind and depth; None for a diverged run, drawn as a cross at the bottom.
    The name of a kind is its scheme, which determines the colour, and its norm, which determines the line style.
    """
    figure, (axes,) = new_panels()
    schemes, norms = (list(dict.fromkeys(kind.rpartition(' ')[i] for kind in results)) for i in (0, 2))
    for kind, by_depth in results.items():
        scheme, _, norm = kind.rpartition(' ')
        colour, line = COLOURS[schemes.index(scheme) % len(COLOURS)], LINES[norms.index(norm) % len(LINES)]
        found = {depth: [value for value in values if value is not None] for depth, values in by_depth.items()}
        found = {depth: values for depth, values in found.items() if values}
        if found:
            axes.plot(list(found), list(map(np.mean, found.values())), line, color=colour, label=kind, marker='.')
            axes.fill_between(list(found), list(map(min, found.values())), list(map(max, found.values())), color=colour,
                              alpha=0.12, linewidth=0)
        failed = [depth for depth, values in by_depth.items() if None in values]
        axes.plot(failed, [0.02 + 0.03 * list(results).index(kind)] * len(failed), 'x', color=colour,
                  transform=axes.get_xaxis_transform(), label=None if found else f'{kind}: diverged')
    depths = sorted({depth for by_depth in results.values() for depth in by_depth})
    axes.set_xscale('log', base=2)
    axes.set_xticks(depths, list(map(str, depths)))
    axes.minorticks_off()
    axes.set(xlabel='layers', ylabel=metric_label(metric))
    finish(figure, 3.0, 'Quality against depth')
    return figure
