"""Pictures of the measures, in sizes that a phone's width leaves legible."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .curves import COLOURS
from .measures import FIELDS, ChannelHistory, PNACOverTraining
from .normality import density
from .sources import short_name

WIDTH = 4.5  # inches
DPI = 200
NAMES = {'activation': 'activation statistic', 'gradient': 'gradient statistic'}
MOST_POINTS = 3000


def pnac_figure(runs: Mapping[str, PNACOverTraining]) -> Figure:
    """Mean PNAC over training (Fig. 3): a colour for each run, gradients dashed.

    With one run, a band shows the middle half of its layers.
    """
    figure, axes = _figure(3.4)
    for i, (run, measure) in enumerate(runs.items()):
        centres = (measure.first + measure.last) / 2
        for j, field in enumerate(FIELDS):
            colour = COLOURS[(i if len(runs) > 1 else j) % len(COLOURS)]
            mean = measure.mean(field)
            if not np.isfinite(mean).any():
                continue
            label = NAMES[field] if len(runs) == 1 else f'{run}: {field}'
            axes.plot(centres, mean, ('-', '--')[j], color=colour, marker='.', label=label)
            if len(runs) == 1:
                percent = measure.percent(field)
                percent = percent[:, np.isfinite(percent).all(axis=0)]
                if percent.shape[1]:
                    low, high = np.percentile(percent, (25, 75), axis=1)
                    axes.fill_between(centres, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel='training step (middle of a span)', ylabel='PNAC, mean of all layers (%)', ylim=(0, 100))
    _title(axes, 'Normal channels over training', runs)
    _legend(figure, axes)
    return figure


def pnac_layers_figure(run: str, measure: PNACOverTraining) -> Figure:
    """PNAC of each layer, mean over training (Fig. 3)."""
    figure, axes = _figure(4.0)
    for colour, marker, field in zip(COLOURS, 'os', FIELDS, strict=False):
        percent = measure.percent(field)
        axes.plot(finite_mean(percent, axis=0), marker=marker, linewidth=0.8, color=colour, label=NAMES[field])
    axes.set(ylabel='PNAC, mean over training (%)', ylim=(0, 100))
    _layer_ticks(axes, measure.layers)
    _title(axes, 'Normal channels by layer', [run])
    _legend(figure, axes)
    return figure


def pnac_density_figure(run: str, measure: PNACOverTraining) -> Figure:
    """Density of PNAC over the layers at the start and at the end (Fig. 7)."""
    figure = Figure(figsize=(WIDTH, 3.1), layout='constrained')
    grid = np.linspace(0, 100, 201)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, field in zip(panels, FIELDS, strict=True):
        percent = measure.percent(field)
        ends = {'start': percent[0], 'end': percent[-1]} if len(percent) > 1 else {'whole record': percent[0]}
        drawn = False
        for colour, line, (label, values) in zip(COLOURS, ('--', '-'), ends.items(), strict=False):
            curve = density(values, grid)
            if np.isfinite(curve).all():
                axes.plot(grid, curve, line, color=colour, label=label)
                axes.fill_between(grid, curve, color=colour, alpha=0.1, linewidth=0)
                drawn = True
        if not drawn:
            axes.text(0.5, 0.5, 'layers do not differ\nor were not tested', ha='center', va='center',
                      transform=axes.transAxes)
        axes.set(xlabel='PNAC (%)', xlim=(0, 100))
        axes.set_title(NAMES[field], fontsize='small')
        axes.grid(alpha=0.3)
    panels[0].set_ylim(bottom=0)  # of both panels: they share it
    panels[0].set_ylabel('density over the layers')
    figure.suptitle(f'Spread of PNAC over the layers\n{run}', fontsize='medium')
    _legend(figure, *panels)
    return figure


def statistics_figure(run: str, histories: Sequence[ChannelHistory], window: int) -> Figure:
    """Statistics of channels over training with GM and AM of the last M steps (Fig. 4)."""
    columns = min(2, len(histories))
    rows = -(-len(histories) // columns)
    figure = Figure(figsize=(WIDTH, 1.1 + 2.3 * rows),
                    layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, history in zip(panels, histories, strict=False):
        thin = slice(None, None, max(1, len(history.steps) // MOST_POINTS))
        # Statistics that change their sign have no geometric mean but by chance.
        has_gm = not (history.values < 0).any()
        for values, label, style in (
                (history.values, 'of the step', dict(color='0.6', linewidth=0.9)),
                (history.am, f'AM of {window} steps', dict(color=COLOURS[1], linewidth=1.2)),
                (history.gm, f'GM of {window} steps', dict(color=COLOURS[0], linewidth=1.2))):
            if np.isfinite(values).any() and (has_gm or values is not history.gm):
                axes.plot(history.steps[thin], values[thin], label=label, **style)
        if not np.isfinite(history.values).any():
            axes.text(0.5, 0.5, 'not recorded', ha='center', va='center', transform=axes.transAxes)
        positive = history.values[np.isfinite(history.values)]
        if len(positive) and positive.min() > 0 and positive.max() > 30 * np.median(positive):
            axes.set_yscale('log')
        else:
            axes.ticklabel_format(axis='y', scilimits=(-2, 4))
        # Above the power of ten at the axis, which it would cover.
        axes.set_title(f'{short_name(history.layer)}\nchannel {history.channel}', fontsize='small', pad=14)
        axes.yaxis.get_offset_text().set_fontsize('small')
        axes.set_xlabel('training step', fontsize='small')
        axes.set_ylabel(NAMES[history.field], fontsize='small')
        axes.tick_params(labelsize='small')
        axes.grid(alpha=0.3)
    for axes in panels[len(histories):]:
        axes.remove()
    figure.suptitle(f'Statistics of single channels\n{run}', fontsize='medium')
    _legend(figure, *panels[:len(histories)])
    return figure


def outliers_figure(run: str, layers: Sequence[str], steps: np.ndarray, counts: np.ndarray) -> Figure:
    """Outlier steps of each layer up to several points of training (Fig. 5), later ones darker."""
    figure, axes = _figure(4.0)
    colours = matplotlib.colormaps['viridis_r'](np.linspace(0.15 if len(steps) > 1 else 1, 1, len(steps)))
    for colour, marker, step, row in zip(colours, 'osD^v<>pPX' * len(steps), steps, counts, strict=False):
        axes.plot(row, marker=marker, markersize=4, linewidth=1.2, color=colour, label=f'step {step}')
    axes.set_ylabel('outlier steps so far')
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    _layer_ticks(axes, layers)
    _title(axes, 'Accumulated outlier steps', [run])
    _legend(figure, axes)
    return figure


def cka_figure(cka: np.ndarray, layers_a: Sequence[str], layers_b: Sequence[str], name_a: str,
               name_b: str) -> Figure:
    """Heat map of linear CKA between all layers of two models (Fig. 6), shallow layers below left."""
    figure, axes = _figure(4.7)
    axes.grid(False)
    image = axes.imshow(cka, origin='lower', vmin=0, vmax=1, cmap='viridis', aspect='auto')
    for axis, names in ((axes.xaxis, layers_b), (axes.yaxis, layers_a)):
        ticks = np.unique(np.linspace(0, len(names) - 1, min(len(names), 16)).round().astype(int))
        axis.set_ticks(ticks, [short_name(names[i]) for i in ticks], fontsize='x-small')
    axes.tick_params(axis='x', rotation=90)
    axes.set(xlabel=f'layers of {name_b}', ylabel=f'layers of {name_a}')
    _title(axes, 'Linear CKA between layers', [name_a, name_b])
    figure.colorbar(image, label='linear CKA')
    return figure


def cka_diagonal_figure(diagonals: Mapping[str, np.ndarray], layers: Sequence[str]) -> Figure:
    """CKA of layers at equal depth; a line for each pair of models."""
    figure, axes = _figure(4.0)
    for i, (label, values) in enumerate(diagonals.items()):
        axes.plot(values, marker='.', color=COLOURS[i % len(COLOURS)], label=label)
    axes.set(ylabel='linear CKA', ylim=(min(0, min(map(np.nanmin, diagonals.values()))), 1.02))
    _layer_ticks(axes, layers, most=30)
    _title(axes, 'Likeness at equal depth', [])
    _legend(figure, axes)
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout='constrained')
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _title(axes: Axes, title: str, runs: Sequence[str]) -> None:
    named = ' and '.join(runs) if len(runs) < 3 else ''
    axes.set_title(f'{title}\n{named}' if named else title, fontsize='medium')


def _legend(figure: Figure, *panels: Axes) -> None:
    handles = {label: handle for axes in panels
               for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        longest = max(map(len, handles))
        columns = 3 if longest < 16 else 2 if longest < 28 else 1
        figure.legend(handles.values(), handles.keys(), loc='outside lower center', ncols=columns,
                      fontsize='small')


def _layer_ticks(axes: Axes, layers: Sequence[str], most: int = 40) -> None:
    ticks = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), most)).round().astype(int))
    axes.set_xticks(ticks, [short_name(layers[i]) for i in ticks], rotation=90, fontsize='x-small')
    axes.set_xlabel('layer, from input to output')
