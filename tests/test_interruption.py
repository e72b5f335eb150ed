"""Ctrl+C while a tool imports torch."""
import ast
import os
import signal
import subprocess
import sys

from mmunorm import interruption
from mmunorm.cli.arguments import command

from . import tiny_runs

TOOLS = sorted(path for pattern in ('tools/*.py', 'tools/*/*.py', 'projects/*/tools/*.py')
               for path in tiny_runs.ROOT.glob(pattern))


def test_no_tool_hides_a_module_of_python():
    """A script's folder comes first on sys.path."""
    names = {path.stem for path in TOOLS}
    assert len(names) > 10 and not names & sys.stdlib_module_names


def interrupt(tmp_path, script):
    """The exit status and stderr of a script that is interrupted while it imports torch, which takes long here."""
    (tmp_path / 'torch.py').write_text('import time\nprint("importing", flush=True)\ntime.sleep(60)\n')
    path = os.pathsep.join([str(tmp_path), str(tiny_runs.ROOT)])
    # Where this process ignores the signal, as in the background of a shell, a child would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=dict(os.environ, PYTHONPATH=path))
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout.readline() == 'importing\n'
        process.send_signal(signal.SIGINT)
        return process.wait(30), process.stderr.read()


def test_a_tool_and_the_installed_command_end_with_one_line(tmp_path):
    (tmp_path / 'mmunorm').write_text('from mmunorm.__main__ import main\nmain()\n')
    for script in (tiny_runs.ROOT / 'tools/train.py', tmp_path / 'mmunorm'):
        assert interrupt(tmp_path, script) == (130, 'interrupted\n')


def test_a_tool_imports_mmunorm_before_other_packages():
    for tool in TOOLS:
        names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                 for node in ast.parse(tool.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        packages = [name.partition('.')[0] for name in names]
        assert next(name for name in packages if name not in sys.stdlib_module_names) == 'mmunorm', tool


def test_scripts_of_users_are_not_changed(tmp_path):
    (tmp_path / 'mine.py').write_text('import mmunorm\n')
    status, error = interrupt(tmp_path, tmp_path / 'mine.py')
    assert status == -signal.SIGINT and error.endswith('KeyboardInterrupt\n')


def test_after_the_imports_it_is_a_keyboard_interrupt_again():
    before = signal.signal(signal.SIGINT, interruption._stop)
    try:
        command(lambda argv: None)([])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
