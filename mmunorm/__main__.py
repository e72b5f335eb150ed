"""Runs the tools of an installed mmunorm: `mmunorm train CONFIG ...` is `python tools/train.py CONFIG ...`."""
from __future__ import annotations

import ast
import os
import re
import runpy
import sys
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

from .registry import MISSING, missing_message

TOOLS = Path(__file__).parent / '.mim/tools'


def main(argv: list[str] | None = None) -> None:
    """Runs the tool named by the first argument, such as `train` or `deploy/export`; without one, lists the tools."""
    argv = sys.argv[1:] if argv is None else argv
    tools = {str(path.relative_to(TOOLS).with_suffix('')): path
             for path in sorted(TOOLS.rglob('*')) if path.suffix in ('.py', '.sh')}
    if argv == ['--version']:
        from . import __version__
        print(f'mmunorm {__version__}')
        return
    if argv and argv[0] not in tools and not argv[0].startswith('-'):
        near = [name for name in tools if name.rpartition('/')[2] in get_close_matches(
            argv[0].rpartition('/')[2], [name.rpartition('/')[2] for name in tools], cutoff=0.5)]
        hint = f'did you mean {" or ".join(near)}?' if near else '`mmunorm` lists them'
        print(f'there is no tool {argv[0]}: {hint}', file=sys.stderr)
        raise SystemExit(2)
    if not argv or argv[0] not in tools:
        print('usage: mmunorm TOOL [arguments]; see `mmunorm TOOL --help`.')
        for _, names in groupby(tools, lambda name: name.rpartition('/')[0]):
            print()
            for name in names:
                print(f'  {name:30}{_summary(tools[name])}')
        print("\nA config begins with _base_ = ['mmunorm::configs/swin_t_un_maskrcnn_3x.py'], for example. The configs "
              f'are in {TOOLS.parent / "configs/configs"}.')
        return
    if MISSING:
        print(missing_message(f'mmunorm {argv[0]}'), file=sys.stderr)
        raise SystemExit(2)
    tool = tools[argv[0]]
    if tool.suffix == '.sh':
        os.execvp('bash', ['bash', str(tool), *argv[1:]])
    sys.argv = [str(tool), *argv[1:]]
    runpy.run_path(str(tool), run_name='__main__')


def _summary(tool: Path) -> str:
    """What a tool does: the first sentence of its docstring, or of its first comment."""
    lines = tool.read_text(encoding='utf-8').splitlines()
    if tool.suffix == '.py':
        text = ' '.join((ast.get_docstring(ast.parse('\n'.join(lines))) or '').split())
        return re.split(r'(?<=[.:])(?<!Fig\.)(?<!Eq\.)\s', text)[0].rstrip(':')
    return next((line.removeprefix('#').strip() for line in lines if re.match('# ', line)), '')


if __name__ == '__main__':
    main()
