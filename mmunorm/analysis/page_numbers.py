"""The numbers of the report's pictures, for JSON."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .curves import METRICS
from .measures import FIELDS
from .work_dirs import MeasuredRun


def report_numbers(measured: Sequence[MeasuredRun], cka: Sequence[dict]) -> dict:
    """All that the report shows, as values that JSON can hold: NaN and infinity become None.

    Args:
        measured: the runs.
        cka: summaries of CKA, as :func:`.page.read_cka` reads them.
    """
    return _plain(dict(runs=[_run(*one) for one in measured], cka=list(cka)))


def _run(run, pnac, histories, outliers, mean_shares, missing) -> dict:
    record = run.record
    return dict(
        name=run.name, config=run.config_name, norms=run.norms, work_directory=str(run.folder),
        last_logged_step=run.last_step,
        recorded=record and dict(steps=len(record.steps), first=record.steps[0], last=record.steps[-1],
                                 layers=[layer.name for layer in record.layers]),
        last_and_best={metric: run.last_and_best(metric) for metric in METRICS if metric in run.scalars},
        curves={name: run.scalars[name] for name in ('loss', *METRICS) if name in run.scalars},
        pnac=pnac and dict(span=pnac.span, first_steps=pnac.first, last_steps=pnac.last,
                           **{f'{field}_percent': pnac.percent(field) for field in FIELDS}),
        channels=[history._asdict() for history in histories],
        outlier_share=run.outlier_share,
        outliers=outliers and dict(zip(('layers', 'steps', 'counts'), outliers, strict=True)),
        mean_shares=mean_shares and mean_shares._asdict(),
        missing=missing)


def _plain(value):
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
