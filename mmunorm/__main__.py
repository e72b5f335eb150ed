"""Runs the tools of an installed mmunorm: `mmunorm train CONFIG ...` is `python tools/train.py CONFIG ...`."""
from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from .registry import MISSING, missing_message

TOOLS = Path(__file__).parent / '.mim/tools'


def main(argv: list[str] | None = None) -> None:
    """Runs the tool named by the first argument, such as `train` or `deploy/export`; without one, lists the tools."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ['--help']
    tools = {str(path.relative_to(TOOLS).with_suffix('')): path
             for path in sorted(TOOLS.rglob('*')) if path.suffix in ('.py', '.sh') and path.stem != 'ship_report'}
    if name not in tools:
        print('usage: mmunorm TOOL [arguments]; see `mmunorm TOOL --help`. Tools:', *tools, sep='\n  ')
        raise SystemExit(None if name == '--help' else f'there is no tool {name}')
    if MISSING:
        raise SystemExit(missing_message(f'mmunorm {name}'))
    if tools[name].suffix == '.sh':
        os.execvp('bash', ['bash', str(tools[name]), *arguments])
    sys.argv = [str(tools[name]), *arguments]
    sys.path.insert(0, str(tools[name].parent))  # as Python does for a script
    runpy.run_path(str(tools[name]), run_name='__main__')


if __name__ == '__main__':
    main()
