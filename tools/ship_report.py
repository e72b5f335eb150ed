"""The report of `tools/ship.py`: a page that begins with the conclusion, and lines for the terminal."""
from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmunorm.benchmark.files import main_metrics, markdown
from mmunorm.benchmark.output import BUSY, NO_DIFFERENCE, speedup
from mmunorm.cli.images import draw_objects, draw_predictions, read_image
from mmunorm.cli.page import render_page
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.utils import plural, write_text

import cv2
import numpy as np

NUM_IMAGES = 4
FEW = 100  # test images: one is a point of accuracy
# Objects are drawn from this score on, as in tools/infer.py.
SCORE_THR = 0.3


@dataclass
class Outcome:
    """The results of all stages."""
    steps: int  # of the training after the conversion
    file: Path
    row: str | None  # of `VARIANTS`, that of the file; None if it does not run on this machine
    usage: str  # how the file is used
    metrics: dict[str, dict[str, float]]  # in torch, by model, in the order of the chain
    result: dict | None  # of tools/deploy/benchmark.py
    # Names of norms with weights and of those without that folding has left: of LayerNorm, exact, and the other norm.
    left: dict[str, tuple[list[str], list[str]]]
    images: int  # of the test set

    @property
    def name(self) -> str:
        """The name of the model in the file."""
        return list(self.left)[-1]

    @property
    def norms_left(self) -> str:
        """A sentence on the norms that are left."""
        norms, plain = self.left[self.name]
        names = f' ({"with weights: " if plain else ""}{", ".join(norms)})' if norms else ''
        return f'norms left: {len(norms + plain)}{f", {len(plain)} of them without weights" if plain else ""}{names}'

    def measured(self, model: str, form: str | None) -> dict | None:
        """The row of a model in a form; None if there is none."""
        rows = self.result['rows'] if self.result else []
        names = dict(zip(dict.fromkeys(row['model'] for row in rows), self.left, strict=True))
        return next((row for row in rows
                     if (names[row['model']], row['format'], row['error']) == (model, form, None)), None)

    def speed(self, row: dict) -> str:
        """A row's speed compared with LayerNorm's; empty if LayerNorm has no file."""
        control = self.result['control']
        return versus_layer_norm(row['to_baseline'], control and control['ratio']) if 'to_baseline' in row else ''

    def conclusion(self) -> list[str]:
        """Sentences: speed, accuracy, norms, size, and how to use the file."""
        lines, row = [], self.measured(self.name, self.row)
        models = {name: found for name in self.left if (found := self.measured(name, self.row))}
        if row:
            speeds = [f'{name}: {self.speed(other) or "LayerNorm has no file"}'
                      for name, other in models.items() if name != 'LayerNorm']
            where = f'{row["label"]} on {self.result["environment"]["cpu"]}, threads: {self.result["threads"]}'
            lines.append(f'{where}. {"; ".join(speeds)}')
        names = list(self.metrics)
        scores = {names[0]: self.metrics[names[0]], self.name: self.metrics[names[-1]]}
        scores |= {'the file' if other is row else f'{name}, {other["label"]}': other['metrics']
                   for name, other in models.items()}
        for key in main_metrics(scores[names[0]]):
            few = ', too few for a verdict' if self.images < FEW else ''
            lines.append(f'{key.rpartition("/")[2]} ({plural(self.images, "test image")}{few}): ' + ', '.join(
                f'{name} {values[key]:#.4g}' for name, values in scores.items()))
        if self.steps:
            lines.append(f'{self.name} had {self.steps} training steps more than LayerNorm: a part of a gain in '
                         'accuracy is theirs')
        size = f', {row["size"] / 1e6:.1f} MB' if row else ''
        return [*lines, f'{self.norms_left}{size}', self.usage]


def versus_layer_norm(ratio: dict[str, float], control: dict[str, float] | None = None) -> str:
    """Formats the ratio of LayerNorm's time to another's; `control` is that of one file in two processes."""
    if (text := speedup(ratio, control)).startswith((NO_DIFFERENCE, BUSY)):
        return text
    value, low, high = (ratio[key] for key in ('value', 'low', 'high'))
    word = 'faster'
    if value < 1:
        value, low, high, word = 1 / value, 1 / high, 1 / low, 'slower'
    return f'{value:.2f}x {word} than LayerNorm [{low:.2f}, {high:.2f}]'


def draw_samples(dataset, runners: dict[str, ExportedModel]) -> list[dict[str, np.ndarray]]:
    """The ground truth and the predictions of models for the first test images; empty without models or image files."""
    drawn = []
    for index in range(min(NUM_IMAGES, len(dataset)) if runners else 0):
        info = dataset.get_data_info(index)
        loading = next(iter(runners.values())).loading
        image = read_image(Path(info['img_path']), **loading) if info.get('img_path') else None
        if image is not None:
            drawn.append({'ground truth': draw_truth(image, info, dataset.metainfo.get('classes')),
                          **{name: draw_predictions(runner, image, SCORE_THR) for name, runner in runners.items()}})
    return drawn


def draw_truth(image: np.ndarray, info: dict, classes: Sequence[str] | None) -> np.ndarray:
    """An image with its labels, from its entry in a data set of mmdet or mmpretrain."""
    if 'gt_label' in info:
        return draw_objects(image, classes, np.array([info['gt_label']]))
    objects = info.get('instances', ())
    labels, boxes = (np.array([one[key] for one in objects]) for key in ('bbox_label', 'bbox'))
    return draw_objects(image, classes, labels, boxes=boxes)


def write_report(path: Path, title: str, outcome: Outcome, stages: list, seconds: dict[str, float],
                 losses: str, fusion: str, images: list[dict[str, np.ndarray]]) -> None:
    """Writes a page that opens from disk and loads nothing.

    `stages` are those of ship.py, `seconds` are by the command of a stage, `losses` is the Markdown table of the
    conversion or '', `fusion` is the report of the folding, and `images` are what :func:`draw_samples` returns.
    """
    models = {**outcome.metrics}
    if row := outcome.measured(outcome.name, outcome.row):
        models['the file'] = row['metrics']
    names = [name for name in next(iter(models.values()))
             if all(values.get(name, -1) != -1 for values in models.values())]  # -1: no such objects
    metrics = [['', *models], *([name, *(f'{values[name]:#.4g}' for values in models.values())] for name in names)]
    measured = markdown(outcome.result) if outcome.result else ''
    write_text(path, render_page(
        Path(__file__).with_name('ship.html.jinja'), title, conclusion=outcome.conclusion(),
        table=table_cells(measured), notes=[line[2:] for line in measured.splitlines() if line.startswith('- ')],
        metrics=metrics, losses=table_cells(losses), fusion=fusion,
        images=[{name: _png(image) for name, image in versions.items()} for versions in images],
        stages=[(stage.title, str(stage), seconds.get(str(stage))) for stage in stages]))


def table_cells(markdown: str) -> list[list[str]]:
    """The cells of a Markdown table; lines around it are left out."""
    rows = [line.strip().strip('|').split('|') for line in markdown.splitlines() if line.startswith('|')]
    return [[cell.strip(' `') for cell in row] for row in rows if set(''.join(row)) - set('-: ')]


def _png(image: np.ndarray) -> str:
    return base64.b64encode(cv2.imencode('.png', image)[1]).decode()
