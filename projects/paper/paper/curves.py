"""Training curves from mmengine's logs."""
from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .layout import finish, new_panels
from .norm_record import RecordError

Scalars = dict[str, np.ndarray]  # name -> (n, 2): step, value

# Okabe and Ito's colour-blind safe palette, without yellow, which is hard to see on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')
LINES = ('-', '--', ':')
# A norm has the same colour in every figure.
NORM_COLOURS = dict(zip(('LN', 'UN', 'BN'), COLOURS, strict=False))
# The metrics that tables and figures show if a run has several, with their labels. Projects add their own.
METRICS = {'accuracy/top1': 'top-1 accuracy (%)', 'coco/bbox_mAP': 'box AP', 'coco/segm_mAP': 'mask AP'}


def metric_label(name: str) -> str:
    """The label of a scalar; without one, its name."""
    return METRICS.get(name, name)


def line_styles(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and line of each label: LN, UN and BN have their own colours, and other labels the rest."""
    labels = list(labels)
    known = {label: (NORM_COLOURS[label], LINES[0]) for label in labels if label in NORM_COLOURS}
    rest = [(colour, line) for line in LINES for colour in COLOURS if (colour, LINES[0]) not in known.values()]
    others = [label for label in labels if label not in known]
    return known | dict(zip(others, itertools.cycle(rest), strict=False))


def read_scalars(path: str | Path) -> Scalars:
    """All logged scalars of a run, of training and validation.

    Logs of an interrupted run and its continuations are merged; if two have the same step, the later log is used.
    Validations get the last training step logged before them, because mmengine numbers validations by epoch or not at
    all.

    Args:
        path: a work directory, or one `scalars.json`.

    Returns:
        `(n, 2)` float64 arrays of training step and value, by name; values may be NaN or infinite. Empty if there is
        no log, or the log is empty.

    Raises:
        RecordError: a line is not in the format of mmengine's LoggerHook.
    """
    path = Path(path)
    points: dict[str, dict[float, float]] = {}
    for file in [path] if path.is_file() else sorted(path.glob('*/vis_data/scalars.json')):
        _read_into(points, file)
    return {name: np.array(sorted(values.items()), dtype=float) for name, values in points.items() if values}


def _read_into(points: dict[str, dict[float, float]], file: Path) -> None:
    step = None
    before = max((max(values) for values in points.values() if values), default=0)
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = dict(json.loads(line))
            is_training = 'lr' in entry or 'loss' in entry
            if is_training and step is None:
                # Drops the steps of earlier logs that come after the checkpoint at which this log starts.
                for name, values in points.items():
                    points[name] = {old: value for old, value in values.items() if old < entry['step']}
            if is_training:
                step = entry['step']
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # the run is writing this line, or was killed while it wrote
                return
            raise RecordError(f"{file}, line {number}: not a line of mmengine's log: {line[:80]!r}.") from error
        for name, value in entry.items():
            if isinstance(value, (int, float)) and name not in ('step', 'iter', 'epoch'):
                points.setdefault(name, {})[step if step is not None else before] = value


def draw_curves(axes: Axes, runs: Mapping[str, Sequence[Scalars]], name: str) -> None:
    """Draws one scalar over training steps: the mean of each label's runs, and a band from minimum to maximum.

    A run is included up to its last step. Non-finite points and runs without the scalar are ignored. The axis is
    logarithmic if a value exceeds 100 times the median.
    """
    drawn = []
    styles = line_styles(runs)
    for label, group in runs.items():
        curves = [run[name][np.isfinite(run[name][:, 1])] for run in group if name in run]
        curves = [curve for curve in curves if len(curve)]
        if not curves:
            continue
        steps = np.unique(np.concatenate([curve[:, 0] for curve in curves]))
        values = np.ma.masked_invalid([
            np.interp(steps, curve[:, 0], curve[:, 1], left=math.nan, right=math.nan) for curve in curves])
        colour, line = styles[label]
        axes.plot(steps, values.mean(axis=0), line, color=colour, label=label, linewidth=1.4,
                  marker='.' if len(steps) < 10 else None)
        drawn.append(values.compressed())
        if len(curves) > 1:
            axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15,
                              linewidth=0)
    drawn = np.concatenate(drawn) if drawn else np.ones(1)
    if drawn.min() > 0 and drawn.max() > 100 * np.median(drawn):
        axes.set_yscale('log')
    axes.set(xlabel='training step', ylabel=metric_label(name))


def curves_figure(panels: Mapping[str, Mapping[str, Sequence[Scalars]]], names: Sequence[str], title: str,
                  below: Sequence[str] = ()) -> Figure:
    """A grid of :func:`draw_curves`: a row for each panel, by its title, and a column for each scalar."""
    figure, grid = new_panels(len(panels), len(names), width=6. * len(names))
    for axes, ((panel, runs), name) in zip(grid, itertools.product(panels.items(), names), strict=True):
        draw_curves(axes, runs, name)
        axes.set_title(': '.join(filter(None, (panel, metric_label(name)))))
    finish(figure, 3.4, title, below)
    return figure
