"""Results of a benchmark as text and files."""
from __future__ import annotations

import json
import math
from pathlib import Path

from ..utils import write_text

NO_DIFFERENCE = 'no difference that this machine can show'
BUSY = 'no verdict, the machine is too busy: measure again'
BUSY_SPREAD = 1.2  # upper over lower quartile of the control


def quartiles(ratio: dict[str, float]) -> str:
    """Formats a :func:`.measure.ratio` as '1.102 [1.051, 1.148]'."""
    return f'{ratio["value"]:.3f} [{ratio["low"]:.3f}, {ratio["high"]:.3f}]'


def speedup(ratio: dict[str, float], control: dict[str, float] | None = None) -> str:
    """Formats a ratio of speeds, or states that it shows no difference.

    It shows none if its quartiles span 1, or if it is not further from 1 than `control`, the ratio of the same file in
    two processes. There is no verdict if the quartiles of `control` are wide.
    """
    if control and control['high'] > BUSY_SPREAD * control['low']:
        return f'{BUSY} (the same file twice: {quartiles(control)})'
    if ratio['low'] <= 1 <= ratio['high'] or (
            control and abs(math.log(ratio['value'])) <= abs(math.log(control['value']))):
        return f'{NO_DIFFERENCE} [{ratio["low"]:.3f}, {ratio["high"]:.3f}]'
    return quartiles(ratio)


def speed_cell(throughput: dict[str, float]) -> str:
    """The median of images/s with its quartiles."""
    return f'{throughput["median"]:.4g} [{throughput["low"]:.4g}, {throughput["high"]:.4g}]'


def write_results(result: dict, text: str, folder: str | Path, stem: str) -> None:
    """Writes a result as `.json` and its table as `.md` to a folder; prints the table and their paths."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    print(text)
    for suffix, content in dict(json=json.dumps(result, indent=1) + '\n', md=text).items():
        path = Path(folder, f'{stem}.{suffix}')
        write_text(path, content)
        print(f'written: {path}')
