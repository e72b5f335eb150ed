"""Applies each patch of this folder to a copy of the repository, where a test has to fail.

    make mutants

A line of TARGETS.txt is a patch and the ids of the tests that hold what it takes away. Ends with status 1 if a patch
survives them or no longer applies.
"""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARALLEL = 2


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script ignore it
    targets = {name: tests for name, *tests in map(str.split, (HERE / 'TARGETS.txt').read_text().splitlines())}
    with TemporaryDirectory() as folder:
        first, *others = copies = [Path(folder, str(i)) for i in range(PARALLEL)]
        for name in git(ROOT, 'ls-files').stdout.splitlines():
            (first / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, first / name, follow_symlinks=False)
        print('without a change:', flush=True)
        if run_tests(first, sorted({test for tests in targets.values() for test in tests}), capture=False):
            print('the tests have to pass first')
            return 1
        free = SimpleQueue()
        for copy in copies:
            free.put(copy)
        for copy in others:
            shutil.copytree(first, copy, symlinks=True)  # with its compiled files
        bad = []
        with ThreadPoolExecutor(PARALLEL) as pool:
            runs = {pool.submit(try_patch, HERE / name, tests, free): name for name, tests in targets.items()}
            for number, run in enumerate(as_completed(runs), 1):
                print(f'{number} of {len(runs)}: {runs[run]} {run.result() or "makes a test fail"}', flush=True)
                bad += [runs[run]] if run.result() else []
    print(f'{len(targets) - len(bad)} of {len(targets)} mutations make a test fail', *bad, sep='\n  ')
    return bool(bad)


def try_patch(patch: Path, tests: list[str], free: SimpleQueue[Path]) -> str:
    """Why a patch may not be detected by the tests, or ''."""
    copy = free.get()
    try:
        if git(copy, 'apply', patch).returncode:
            return 'NO LONGER APPLIES'
        status = run_tests(copy, tests)
        git(copy, 'apply', '--reverse', patch)
        return {0: 'SURVIVES', 1: ''}.get(status, f'ENDS PYTEST WITH STATUS {status}')
    finally:
        free.put(copy)


def git(folder: Path, *args) -> subprocess.CompletedProcess:
    return subprocess.run(['git', *args], cwd=folder, capture_output=True, text=True)


def run_tests(folder: Path, tests: list[str], capture: bool = True) -> int:
    # The installed package is the original.
    environment = {**os.environ, 'PYTHONPATH': str(folder), 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', *tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=capture).returncode


if __name__ == '__main__':
    sys.exit(main())
