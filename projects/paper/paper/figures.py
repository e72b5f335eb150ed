"""Figures of the measures, legible on a phone."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .curves import COLOURS, Scalars, draw_curves, metric_label
from .layout import WIDTH, finish, new_panels, wrapped
from .measures import FIELDS, ChannelHistory, MeanShares, PNACOverTraining, evenly_spaced, finite_mean
from .normality import density

NAMES = {'activation': 'activation statistic', 'gradient': 'gradient statistic'}
STYLES = dict(zip(FIELDS, ('-', '--'), strict=True))
MARKERS = '.x^s'


def scalar_figure(runs: Mapping[str, Scalars], name: str) -> Figure:
    """One logged scalar over training, one line per run (Fig. 1)."""
    figure, (axes,) = new_panels()
    draw_curves(axes, {run: [scalars] for run, scalars in runs.items()}, name)
    finish(figure, 2.4, f'{metric_label(name)} over training')
    return figure


def pnac_figure(runs: Mapping[str, PNACOverTraining]) -> Figure:
    """Mean PNAC over training (Fig. 3): a colour for each run, gradients dashed.

    With one run, each statistic has its own colour, and a band shows the middle half of the layers.
    """
    figure, (axes,) = new_panels()
    handles: dict[str, Artist] = {}
    for i, (run, measure) in enumerate(runs.items()):
        centres = (measure.first + measure.last) / 2
        for j, field in enumerate(FIELDS):
            colour = COLOURS[(i if len(runs) > 1 else j) % len(COLOURS)]
            mean = measure.mean(field)
            if not np.isfinite(mean).any():
                continue
            line, = axes.plot(centres, mean, STYLES[field], color=colour,
                              marker=MARKERS[i // len(COLOURS) % len(MARKERS)])
            if len(runs) == 1:
                handles[NAMES[field]] = line
                percent = measure.percent(field)
                percent = percent[:, np.isfinite(percent).all(axis=0)]
                if percent.shape[1]:
                    low, high = np.percentile(percent, (25, 75), axis=1)
                    axes.fill_between(centres, low, high, color=colour, alpha=0.15, linewidth=0)
                continue
            handles.setdefault(run, Line2D([], [], color=colour, marker=line.get_marker()))
    if len(runs) > 1:
        handles.update({NAMES[field]: Line2D([], [], color='0.4', linestyle=style)
                        for field, style in STYLES.items()})
    axes.set(xlabel='training step (middle of a span)', ylabel='PNAC, mean of all layers (%)', ylim=(0, 100))
    finish(figure, 2.4, 'Normal channels over training', list(runs) if len(runs) == 1 else [], handles)
    return figure


def pnac_layers_figure(run: str, measure: PNACOverTraining) -> Figure:
    """PNAC of each layer, mean over training (Fig. 3)."""
    figure, (axes,) = new_panels()
    for colour, marker, field in zip(COLOURS, 'os', FIELDS, strict=False):
        axes.plot(finite_mean(measure.percent(field), axis=0), marker=marker, linewidth=0.8, color=colour,
                  label=NAMES[field])
    axes.set(ylabel='PNAC, mean over training (%)', ylim=(0, 100))
    _layer_ticks(axes, measure.layers)
    finish(figure, 2.4, 'Normal channels by layer', [run])
    return figure


def pnac_density_figure(run: str, measure: PNACOverTraining) -> Figure:
    """Density of PNAC over the layers at the start and at the end (Fig. 7)."""
    figure, panels = new_panels(1, 2, sharey=True)
    grid = np.linspace(0, 100, 201)
    ends = {'start': 0, 'end': -1} if len(measure.first) > 1 else {'only span': 0}
    ends = {f'{name} (steps {measure.first[i]} to {measure.last[i]})': i for name, i in ends.items()}
    for axes, field in zip(panels, FIELDS, strict=True):
        percent = measure.percent(field)
        for colour, line, (label, i) in zip(COLOURS, ('--', '-'), ends.items(), strict=False):
            curve = density(percent[i], grid)
            if np.isfinite(curve).all():
                axes.plot(grid, curve, line, color=colour, label=label)
                axes.fill_between(grid, curve, color=colour, alpha=0.1, linewidth=0)
        if not axes.lines:
            axes.text(0.5, 0.5, 'layers do not differ\nor were not tested', ha='center', va='center',
                      transform=axes.transAxes)
        axes.set(xlabel='PNAC (%)', xlim=(0, 100))
        axes.set_title(NAMES[field], fontsize='small')
    panels[0].set_ylim(bottom=0)  # of both panels: they share it
    panels[0].set_ylabel('density over the layers')
    finish(figure, 1.9, 'Spread of PNAC over the layers', [run])
    return figure


def statistics_figure(run: str, histories: Sequence[ChannelHistory], window: int) -> Figure:
    """Statistics of channels over training with GM and AM of the last M steps (Fig. 4)."""
    columns = min(2, len(histories))
    rows = -(-len(histories) // columns)
    figure, panels = new_panels(rows, columns)
    for axes in panels[len(histories):]:
        axes.remove()
    for axes, history in zip(panels, histories, strict=False):
        # The geometric mean is not drawn for statistics that change their sign.
        has_gm = not (history.values < 0).any()
        for values, label, style in (
                (history.values, 'of the step', dict(color='0.6', linewidth=0.9)),
                (history.am, f'AM of {window} steps', dict(color=COLOURS[1], linewidth=1.2)),
                (history.gm, f'GM of {window} steps', dict(color=COLOURS[0], linewidth=1.2))):
            if np.isfinite(values).any() and (has_gm or values is not history.gm):
                axes.plot(history.steps, values, label=label, **style)
        if not np.isfinite(history.values).any():
            axes.text(0.5, 0.5, 'not recorded', ha='center', va='center', transform=axes.transAxes)
        positive = history.values[np.isfinite(history.values)]
        if len(positive) and positive.min() > 0 and positive.max() > 30 * np.median(positive):
            axes.set_yscale('log')
        else:
            axes.ticklabel_format(axis='y', scilimits=(-2, 4))
        # Padded, because the axis may have a power of ten below the title.
        name = wrapped(short_name(history.layer), 0.9 * WIDTH / columns)
        axes.set_title(f'{name}\nchannel {history.channel}', fontsize='small', pad=14)
        axes.yaxis.get_offset_text().set_fontsize('small')
        small_labels(axes, 'training step', NAMES[history.field])
    finish(figure, 1.4, 'Statistics of single channels', [run])
    return figure


def outliers_figure(run: str, layers: Sequence[str], steps: np.ndarray, counts: np.ndarray) -> Figure:
    """Outlier steps of each layer up to several points of training (Fig. 5), later ones darker."""
    figure, (axes,) = new_panels()
    colours = matplotlib.colormaps['viridis_r'](np.linspace(0.15 if len(steps) > 1 else 1, 1, len(steps)))
    for colour, marker, step, row in zip(colours, 'osD^v<>pPX' * len(steps), steps, counts, strict=False):
        axes.plot(row, marker=marker, markersize=4, linewidth=1.2, color=colour, label=f'step {step}')
    axes.set_ylabel('outlier steps so far')
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    _layer_ticks(axes, layers)
    finish(figure, 2.4, 'Accumulated outlier steps', [run])
    return figure


def mean_shares_figure(run: str, shares: MeanShares) -> Figure:
    """The mean's share of a norm's input, by layer, at the start and at the end of a record."""
    figure, (axes,) = new_panels()
    ends = {0: 'o', len(shares.steps) - 1: 's'}
    for colour, label, values in ((COLOURS[0], 'all channels', shares.all_channels),
                                  (COLOURS[1], 'highest channel', shares.highest_channel)):
        for i, marker in ends.items():
            axes.plot(values[i], '--' if i == 0 and len(ends) > 1 else '-', marker=marker, markersize=4, linewidth=1,
                      color=colour, label=f'{label}, step {shares.steps[i]}')
    axes.set(ylabel='mean(x)$^2$ / mean(x$^2$)', ylim=(-0.02, 1.02))
    _layer_ticks(axes, shares.layers)
    finish(figure, 2.4, 'Share of the mean in the mean square', [run])
    return figure


def cka_figure(cka: np.ndarray, layers_a: Sequence[str], layers_b: Sequence[str], name_a: str, name_b: str) -> Figure:
    """Heat map of linear CKA between all layers of two models (Fig. 6); shallow layers are at the lower left."""
    figure, (axes,) = new_panels()
    axes.grid(False)
    image = axes.imshow(cka, origin='lower', vmin=0, vmax=1, cmap='viridis', aspect='auto')
    for axis, names in ((axes.xaxis, layers_b), (axes.yaxis, layers_a)):
        ticks = evenly_spaced(names, 16)
        axis.set_ticks(ticks, [short_name(names[i]) for i in ticks], fontsize='x-small')
    axes.tick_params(axis='x', rotation=90)
    axes.set(xlabel=wrapped(f'layers of {name_b}', 2.8), ylabel=wrapped(f'layers of {name_a}', 2.6))
    figure.colorbar(image, label='linear CKA')
    finish(figure, 2.7, 'Linear CKA between layers', [name_a, name_b])
    return figure


def cka_diagonal_figure(diagonals: Mapping[str, np.ndarray], layers: Sequence[str]) -> Figure:
    """CKA of layers at equal depth, one line per pair of models."""
    figure, (axes,) = new_panels()
    for i, (label, values) in enumerate(diagonals.items()):
        axes.plot(values, marker='.', color=COLOURS[i % len(COLOURS)], label=label)
    axes.set(ylabel='linear CKA', ylim=(min(0, min(map(np.nanmin, diagonals.values()))), 1.02))
    _layer_ticks(axes, layers, most=30)
    finish(figure, 2.4, 'Similarity at equal depth')
    return figure


def small_labels(axes: Axes, x: str, y: str) -> None:
    """Labels an axis of a figure of several panels."""
    axes.set_xlabel(x, fontsize='small')
    axes.set_ylabel(y, fontsize='small')
    axes.tick_params(labelsize='small')


def _layer_ticks(axes: Axes, layers: Sequence[str], most: int = 40) -> None:
    ticks = evenly_spaced(layers, most)
    axes.set_xticks(ticks, [short_name(layers[i]) for i in ticks], rotation=90, fontsize='x-small')
    axes.set_xlabel('layer, from input to output')


def short_name(layer: str) -> str:
    """A layer's name as a short label, without the parts that all layers of a backbone share."""
    for long, short in (('backbone.', ''), ('stages.', 's'), ('.blocks.', '.b'), ('layers.', 'l'),
                        ('.downsample.', '.down.')):
        layer = layer.replace(long, short)
    return layer
