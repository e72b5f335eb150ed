"""A stand-in for tools/train.py, for tools that train many times."""
import pytest

from projects.paper.paper import training

# Fakes tools/train.py: writes the files of a run at once. OUTCOMES/NORM decides.
FAKE_TRAIN = """
import json, pathlib, sys, time
config, work_dir = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
assert sys.argv[2] == '--work-dir' and sys.argv[4:] == ['--resume']
with open('{folder}/calls', 'a') as calls:
    calls.write('/'.join(work_dir.parts[-3:]) + chr(10))
outcome = pathlib.Path('{folder}/outcomes', work_dir.parent.name)
outcome = outcome.read_text() if outcome.exists() else 'finishes'
if outcome == 'sleeps':
    time.sleep(600)
if outcome == 'ends early':
    sys.exit()
if outcome == 'crashes':
    sys.exit('Boom')
if outcome == 'diverges':
    (work_dir / 'divergence.json').write_text(json.dumps(dict(step=7, message='the run diverged')))
    sys.exit(3)
log = work_dir / '1/vis_data/scalars.json'
log.parent.mkdir(parents=True)
entries = [dict(lr=1, loss=2.0, step=5), {{'accuracy/top1': 50.0, 'step': 1}}]
log.write_text(chr(10).join(map(json.dumps, entries)))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Decides how the runs of a norm end; `calls()` are the runs that were started since the last time."""
    (tmp_path / 'outcomes').mkdir()
    (tmp_path / 'train.py').write_text(FAKE_TRAIN.format(folder=tmp_path))
    monkeypatch.setattr(training, 'TRAIN', tmp_path / 'train.py')

    class Fake:

        def __call__(self, norm, outcome):
            (tmp_path / 'outcomes' / norm).write_text(outcome)

        def calls(self):
            path = tmp_path / 'calls'
            calls = path.read_text().split() if path.exists() else []
            path.unlink(missing_ok=True)
            return calls

    return Fake()
