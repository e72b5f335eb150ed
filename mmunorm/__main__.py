"""Runs the tools of an installed mmunorm: `mmunorm train CONFIG ...` is `python tools/train.py CONFIG ...`."""
from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from .registry import MISSING, what_is_missing

TOOLS = Path(__file__).parent / '.mim/tools'


def main(argv: list[str] | None = None) -> None:
    """Runs the tool that the first argument names, such as `train` or `analysis/report`; without one, lists them."""
    argv = sys.argv[1:] if argv is None else argv
    tools = {str(path.relative_to(TOOLS).with_suffix('')): path
             for path in sorted(TOOLS.rglob('*')) if path.suffix in ('.py', '.sh')}
    if not argv or argv[0] not in tools:
        problem = f'there is no tool {argv[0]}\n' if argv and not argv[0].startswith('-') else ''
        print(f'{problem}usage: mmunorm TOOL [arguments], where TOOL is one of {", ".join(tools)}; its own --help says '
              "more.\nA config begins with _base_ = ['mmunorm::configs/swin_t_un_maskrcnn_3x.py'], for example. The "
              f'configs are in {TOOLS.parent / "configs/configs"}.', file=sys.stderr)
        raise SystemExit(2 if problem else 0)
    if MISSING:
        print(what_is_missing(f'mmunorm {argv[0]}'), file=sys.stderr)
        raise SystemExit(2)
    tool = tools[argv[0]]
    if tool.suffix == '.sh':
        os.execvp('bash', ['bash', str(tool), *argv[1:]])
    sys.argv = [str(tool), *argv[1:]]
    runpy.run_path(str(tool), run_name='__main__')


if __name__ == '__main__':
    main()
