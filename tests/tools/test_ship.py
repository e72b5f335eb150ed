"""tools/ship.py: the plan, what it refuses, and the whole chain of a tiny classifier."""
import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from mmengine.config import Config

from mmunorm.utils import RunError

from .. import processes, tiny_runs

for package in ('onnx', 'onnxscript', 'onnxruntime'):
    pytest.importorskip(package)

pytestmark = pytest.mark.usefixtures('in_a_folder')
TOOLS = tiny_runs.ROOT / 'tools'
SHIP = tiny_runs.load_tool('ship')


@pytest.fixture(scope='module')
def ln_classifier(tmp_path_factory):
    """Config and untrained weights of a classifier with LayerNorm and one block."""
    return tiny_runs.ln_twin(tiny_runs.write_classifier(tmp_path_factory.mktemp('ln'), stages=1))


def ship(ln, *arguments):
    return tiny_runs.call(SHIP, *ln, '--format', 'onnx', '--out', 'out', *arguments)


def test_a_dry_run_prints_the_commands(ln_classifier, tmp_path, capsys):
    stages = ship(ln_classifier, '--dry-run', '--cfg-options', 'test_dataloader.batch_size=1')
    printed = capsys.readouterr().out
    assert [stage.command[0].rpartition('/')[2] for stage in stages] == [
        'convert_norms.py', 'train.py', 'test.py', 'export.py', 'benchmark.py']
    assert all(f'$ {stage}\n' in printed for stage in stages)
    assert '/trained/iter_1.pth' in str(stages[2])  # 2 steps an epoch: a quarter
    assert all(text in str(stages[0]) for text in ('--cfg-options test_dataloader.batch_size=1', '--to UN=UN,warmup'))
    untrained = ship(ln_classifier, '--dry-run', '--steps', '0', '--trust-checkpoint')
    assert len(untrained) == 3 and 'out/converted/swin_un_tiny.pth' in untrained[1].command
    assert ['--trust-checkpoint' in stage.command for stage in untrained] == [True, False, True]
    assert ['--num-samples 512' in str(stage) for stage in untrained] == [True, False, False]
    images = Path(Config.fromfile(ln_classifier[0]).test_dataloader.dataset.data_root)
    unlabelled = ship(ln_classifier, '--dry-run', '--steps', '0', '--images', str(images / 'dark'), '--num-samples',
                      '8', '--beside', 'torch', 'onnx', '--cfg-options',
                      'train_dataloader.dataset.data_root=gone')  # which nothing reads
    assert f'--images {images}/dark --adapt-steps 300' in str(unlabelled[0]) and len(unlabelled) == 3
    assert all('--num-samples 8' in str(stage) for stage in unlabelled)
    assert '--formats onnx torch --metrics-of onnx --file onnx out/model.onnx' in str(unlabelled[2])
    exact = ship(ln_classifier, '--dry-run', '--to', 'exact', '--trust-checkpoint', '--cfg-options',
                 'test_dataloader.batch_size=1')
    assert [stage.command[0].rpartition('/')[2] for stage in exact] == ['test.py', 'export.py', 'benchmark.py']
    for stage in exact:  # each reads the old checkpoint
        assert stage.command[1:3] == tuple(map(str, ln_classifier))
        assert stage.command[-3:] == ('--trust-checkpoint', '--cfg-options', 'test_dataloader.batch_size=1')
    assert not (tmp_path / 'out').exists()


@pytest.fixture
def _in_this_process(monkeypatch):
    """Runs the stages without the minutes in which new processes import everything and speed is measured."""
    processes.start()

    def run(command):
        tool, *arguments = command
        if tool.endswith('benchmark.py'):
            arguments += ['--repeat', '2']
        with redirect_stdout(StringIO()):
            tiny_runs.call(str(Path(tool).resolve().relative_to(TOOLS).with_suffix('')), *arguments)
        return 0

    monkeypatch.setattr(SHIP, 'run_tool', run)


@pytest.mark.slow
@pytest.mark.usefixtures('_in_this_process')
@pytest.mark.grid
def test_backbone_and_neck_of_a_detector(tmp_path, capsys):
    un, options = tiny_runs.write_detector(tmp_path)
    config = tmp_path / 'detector_ln.py'
    config.write_text(f"_base_ = ['{un}']\nmodel = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='LN')))\n")
    checkpoint = tiny_runs.save_weights(Config.fromfile(config), tmp_path / 'ln.pth', list(map(str, range(80))))
    outcome = ship((config, checkpoint), '--parts', 'backbone', '--num-samples', '2', '--adapt-steps', '0', '--steps',
                   '0', '--cfg-options', *options)
    assert outcome.left['UN'] == ([], []) and len(outcome.left['exact'][1]) == 16
    assert outcome.measured('UN', 'onnx')['metrics'] == outcome.metrics['converted']
    assert outcome.measured('exact', 'onnx')['metrics'] == outcome.metrics['LayerNorm']
    assert 'use it: python tools/deploy/test.py out/converted/detector_un.py out/model.onnx --checkpoint' in (
        capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.usefixtures('_in_this_process')
def test_the_whole_chain(ln_classifier, tmp_path, capsys):
    chain = ln_classifier, '--num-samples', '4', '--adapt-steps', '2', '--steps', '2'
    outcome = ship(*chain)
    assert list(outcome.metrics) == ['LayerNorm', 'converted', 'trained and folded'] and outcome.left['UN'] == ([], [])
    before, exact, after = (outcome.measured(model, 'onnx') for model in ('LayerNorm', 'exact', 'UN'))
    assert before['metrics'] == exact['metrics'] == outcome.metrics['LayerNorm']
    assert after['metrics'] == outcome.metrics['trained and folded'] and after['seconds']
    assert after['size'] == (tmp_path / 'out/model.onnx').stat().st_size
    printed = capsys.readouterr().out
    assert all(text in printed for text in (
        'norms left: 0, ', 'UN had 2 training steps more than LayerNorm', 'use it: python tools/deploy/infer.py'))
    assert printed.splitlines()[-1] == 'written: out/report.html'
    report = (tmp_path / 'out/report.html').read_text()
    assert 'ONNX Runtime' in report and report.count('data:image/png') == 4 * 3
    assert 'accuracy/top1' in report and 'backbone.stages.0.blocks.0.norm1' in report and 'src="http' not in report
    state = tiny_runs.checkpoint('out/trained/iter_2.pth')['state_dict']
    assert state['backbone.norm0.num_batches_tracked'] == 2

    done = json.loads((tmp_path / 'out/ship.json').read_text())
    written = (tmp_path / 'out/trained/iter_2.pth').stat().st_mtime_ns
    shutil.rmtree('out/folded')  # is made again; nothing else is
    del done[next(command for command in done if 'test.py' in command)]
    (tmp_path / 'out/ship.json').write_text(json.dumps(done))
    assert ship(*chain).metrics == outcome.metrics
    assert capsys.readouterr().out.count('=== is done') == 4 and (tmp_path / 'out/folded').exists()
    assert (tmp_path / 'out/trained/iter_2.pth').stat().st_mtime_ns == written


@pytest.mark.slow
@pytest.mark.usefixtures('_in_this_process')
def test_the_exact_fold(ln_classifier, tmp_path, capsys):
    outcome = ship(ln_classifier, '--to', 'exact')
    norms, plain = outcome.left['exact']
    assert list(outcome.left) == ['LayerNorm', 'exact'] and norms == ['backbone.patch_embed.norm'] and len(plain) == 3
    before, after = (outcome.measured(model, 'onnx') for model in outcome.left)
    assert before['metrics'] == after['metrics'] == outcome.metrics['exact'] and 'to_baseline' in after
    assert after['size'] == (tmp_path / 'out/model.onnx').stat().st_size
    printed = capsys.readouterr().out
    assert 'norms left: 4, 3 of them without weights (with weights: backbone.patch_embed.norm), ' in printed
    assert 'did not fold' not in printed
    report = (tmp_path / 'out/report.html').read_text()
    assert 'What the conversion lost' not in report and '3 are now norms without weights' in report


def test_a_failed_stage_is_named(tmp_path):
    stages = [SHIP.Stage('Works', ('-c', 'open("made", "w")'), tmp_path / 'made'),
              SHIP.Stage('Fails', ('-c', 'raise SystemExit(4)'), tmp_path / 'other')]
    with pytest.raises(RunError, match='ended with status 4. .*the same call of ship.py goes on from there'):
        SHIP.run_stages(stages, tmp_path)
    assert list(json.loads((tmp_path / 'ship.json').read_text())) == [str(stages[0])] and (tmp_path / 'made').exists()
