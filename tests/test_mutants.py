"""The patches of `make mutants`, without their runs."""
import subprocess

from .tiny_runs import ROOT

FOLDER = ROOT / 'tests/mutants'


def test_each_patch_applies_and_names_its_tests():
    targets = dict(line.split(maxsplit=1) for line in (FOLDER / 'TARGETS.txt').read_text().splitlines())
    assert targets.keys() == {path.name for path in FOLDER.glob('*.patch')}
    for name, tests in targets.items():
        assert all((ROOT / test.partition('::')[0]).is_file() for test in tests.split()), name
        done = subprocess.run(['git', 'apply', '--check', FOLDER / name], cwd=ROOT, capture_output=True, text=True)
        assert not done.returncode, done.stderr
