"""Figures of the first steps of deep models, and of quality against depth."""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from projects.paper.paper.curves import COLOURS, LINES, Scalars, line_styles, metric_label
from projects.paper.paper.figures import small_labels
from projects.paper.paper.layout import finish, new_panels

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


class Quality(NamedTuple):
    """A metric over the seeds of one kind of model at one depth."""
    mean: float | None  # None if all seeds diverged
    std: float | None  # None of one seed
    diverged: int  # seeds


def quality_figure(results: Mapping[tuple[str, str], Mapping[int, Quality]], metric: str) -> Figure:
    """A metric against depth by scheme and norm: one panel per scheme, one line per norm.

    A line is the mean over seeds with its standard deviation. A cross at the bottom is a diverged run.
    """
    schemes, norms = (list(dict.fromkeys(kind[i] for kind in results)) for i in (0, 1))
    depths = sorted({depth for by_depth in results.values() for depth in by_depth})
    figure, panels = new_panels(-(-len(schemes) // 2), min(2, len(schemes)), sharey=True)
    for axes in panels[len(schemes):]:
        axes.remove()
    styles = line_styles(norms)
    for axes, scheme in zip(panels, schemes, strict=False):
        for i, norm in enumerate(norms):
            by_depth = results.get((scheme, norm), {})
            colour, line = styles[norm]
            found = {depth: entry for depth, entry in by_depth.items() if entry.mean is not None}
            if found:
                axes.errorbar(list(found), [entry.mean for entry in found.values()],
                              [entry.std or 0 for entry in found.values()], linestyle=line, color=colour, label=norm,
                              marker='.', capsize=2)
            failed = [depth for depth, entry in by_depth.items() if entry.diverged]
            if failed:
                axes.plot(failed, [0.04 + 0.08 * i] * len(failed), 'x', color=colour,
                          transform=axes.get_xaxis_transform(), label=None if found else f'{norm}: diverged')
        axes.set_title(scheme, fontsize='small')
        axes.set_xscale('log', base=2)
        axes.set_xticks(depths, list(map(str, depths)))
        axes.minorticks_off()
        small_labels(axes, 'layers', '' if axes not in panels[::2] else metric_label(metric))
    finish(figure, 1.3, 'Quality against depth')
    return figure
