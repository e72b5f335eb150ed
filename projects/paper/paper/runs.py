"""Training runs of a recipe with different norms and seeds: their folders and results."""
from __future__ import annotations

import ast
import json
import pprint
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmengine.config import Config

from mmunorm.config.presets import slug
from mmunorm.config.walk import walk
from mmunorm.utils import PreflightError, write_text

from .curves import read_scalars
from .divergence import RECORD

FINISHED, FAIL, ERROR, MISSING = 'finished', 'FAIL', 'error', 'missing'
BASELINE, STRESSED = 'calm', 'stressed'
_RESULT = 'result.json'


@dataclass(frozen=True)
class ComparedRun:
    """A training run in `OUT/NORM/seed_K/` or `OUT/stressed/NORM/seed_K/`; its config is `seed_K.py` next to it."""
    out: Path
    norm: str
    seed: int
    condition: str = BASELINE

    @property
    def work_dir(self) -> Path:
        folder = self.out / STRESSED if self.condition == STRESSED else self.out
        return folder / slug(self.norm) / f'seed_{self.seed}'

    @property
    def config(self) -> Path:
        return self.work_dir.with_suffix('.py')

    @property
    def log(self) -> Path:
        return self.work_dir / 'output.log'

    def __str__(self) -> str:
        stressed = f'{STRESSED} ' if self.condition == STRESSED else ''
        return f'{stressed}{self.norm} seed {self.seed}'

    def result(self) -> dict | None:
        """The result of a finished run: `status` (FINISHED or FAIL), `step`, `metrics`, `message`; or None."""
        return _read(self.work_dir / _RESULT)

    def has_begun(self) -> bool:
        """Whether its folder has a checkpoint or a result."""
        return self.result() is not None or any(self.work_dir.glob('*.pth'))

    def close(self, returncode: int) -> dict | None:
        """Writes the result of a run whose process has exited; None if it crashed or was interrupted.

        A run is not finished if it has no log, or if its last step is later than a metric, because its validation was
        interrupted. Then it returns None for any exit status, and the run can be resumed.
        """
        if record := _read(self.work_dir / RECORD):
            result = dict(status=FAIL, step=record['step'], metrics={}, message=record['message'])
        else:
            scalars = read_scalars(self.work_dir) if returncode == 0 else {}
            last = max((int(values[-1, 0]) for values in scalars.values()), default=None)
            # NormStatisticsHook's numbers belong to training, not to a validation.
            measured = {name: values[-1] for name, values in scalars.items()
                        if '/' in name and not name.startswith('norm/')}
            if last is None or any(step < last for step, _ in measured.values()):
                return None
            metrics = {name: float(value) for name, (_, value) in measured.items()}
            result = dict(status=FINISHED, step=last, metrics=metrics, message='')
        write_text(self.work_dir / _RESULT, json.dumps(result, indent=1))
        return result


def _read(path: Path) -> dict | None:
    """A JSON file of a run, or None. Raises a PreflightError if it is damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PreflightError(f'{path} is damaged: remove it and run the same command to continue.') from error


def config_text(cfg: Config) -> str:
    """A merged config as a self-contained Python file."""
    return ''.join(f'{key} = {pprint.pformat(value, width=110, sort_dicts=False)}\n'
                   for key, value in cfg.to_dict().items())


def read_settings(path: Path) -> dict:
    """The settings in a file with the text of :func:`config_text`, which is not run."""
    return {line.targets[0].id: ast.literal_eval(line.value) for line in ast.parse(path.read_text()).body}


def differing_keys(one: Mapping, other: Mapping) -> list[str]:
    """The dotted names of the settings that differ between two configs."""
    one, other = ({key: value for key, value in walk(cfg) if not (isinstance(value, (Mapping, list, tuple)) and value)}
                  for cfg in (one, other))
    return sorted(key for key in one.keys() | other.keys() if one.get(key, ...) != other.get(key, ...))
