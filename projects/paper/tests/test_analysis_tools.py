import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmunorm.checkpoints.folded import save_folded
from mmunorm.cli.arguments import load_config
from mmunorm.config.models import load_model
from mmunorm.fusion import fuse_norms
from projects.paper.paper import NormRecord
from tests import data_makers, tiny_runs

from .logs import train, write_log
from .records import NAMES, write_record

PNAC, CHANNELS, OUTLIERS, CKA, REPORT, CURVES, SPREAD = (
    tiny_runs.load_tool(f'paper:{name}')
    for name in ('pnac', 'channels', 'outliers', 'cka', 'report', 'curves', 'spread'))

pytestmark = pytest.mark.usefixtures('in_a_folder')
run, error_of = tiny_runs.call, tiny_runs.error_of


def read_csv(path):
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def check_images(folder, *names):
    assert sorted(path.name for path in folder.glob('*.png')) == sorted(names)
    for name in names:
        assert min(Image.open(folder / name).size) > 500


def test_pnac_of_one_and_of_several_runs(tmp_path, capsys):
    write_record(tmp_path / 'one'), write_record(tmp_path / 'two', norm='LayerNorm', gradient=False)
    run(PNAC, 'one', '--out', 'a', '--span', '30')
    check_images(tmp_path / 'a', 'pnac.png', 'pnac_layers.png', 'pnac_density.png')
    rows = read_csv('a/pnac.csv')
    assert len(rows) == 2 * 2 * 3 and {row['layer'] for row in rows} == set(NAMES)
    assert {(row['first_step'], row['last_step']) for row in rows} == {('1', '30'), ('31', '60')}
    normal, wild = ([float(row['pnac_percent']) for row in rows if row['layer'] == name
                     and row['statistic'] == 'activation'] for name in NAMES[:2])
    assert min(normal) > 75 and max(wild) < 25
    capsys.readouterr()
    run(PNAC, 'one', 'two/norm_statistics', '--out', 'b')
    assert 'two (LayerNorm): No layer has gradient statistics' in capsys.readouterr().out
    check_images(tmp_path / 'b', 'pnac.png', *(f'pnac_{kind}_{i}.png' for kind in ('layers', 'density')
                                                 for i in (1, 2)))
    for other in ('one', 'one/.', 'one/norm_statistics'):
        assert 'is given twice' in error_of(capsys, PNAC, 'one', other, '--out', 'c')


def test_statistics_of_chosen_and_of_named_channels(tmp_path, capsys):
    write_record(tmp_path / 'w')
    run(CHANNELS, 'w', '--out', 'a')
    assert {row['layer'] for row in read_csv('a/channels.csv')} == set(NAMES)
    run(CHANNELS, 'w', '--out', 'b', '--layers', NAMES[1], '--channels', '7', '--steps', '11', '20',
        '--window', '3')
    rows = read_csv('b/channels.csv')
    assert [row['step'] for row in rows] == [str(step) for step in range(11, 21)] * 2
    assert {(row['layer'], row['channel']) for row in rows} == {(NAMES[1], '7')}
    last = NormRecord(tmp_path / 'w/norm_statistics').activation(1)[17:20, 7].astype(float)
    np.testing.assert_allclose([float(rows[9][name]) for name in ('value', 'am', 'gm')],
                               [last[-1], last.mean(), np.prod(last) ** (1 / 3)], rtol=1e-5)
    check_images(tmp_path / 'b', 'channels.png')
    assert 'no layer' in error_of(capsys, CHANNELS, 'w', '--out', 'c', '--layers', 'gone')
    assert '--steps' in error_of(capsys, CHANNELS, 'w', '--out', 'c', '--steps', '100', '200')
    with pytest.raises(SystemExit):
        run(CHANNELS, 'w', '--out', 'c', '--channels', '1', '2')


def test_outliers(tmp_path, capsys):
    write_record(tmp_path / 'w')
    run(OUTLIERS, 'w', '--out', 'a', '--points', '2')
    rows = read_csv('a/outliers.csv')
    assert [(row['step'], row['outlier_steps']) for row in rows] == [
        ('30', '0')] * 3 + [('60', '10'), ('60', '15'), ('60', '30')]
    check_images(tmp_path / 'a', 'outliers.png')
    write_record(tmp_path / 'ln', norm='LayerNorm')
    assert 'no layer with an outlier filter' in error_of(capsys, OUTLIERS, 'ln', '--out', 'b')


def test_errors(tmp_path, capsys):
    assert 'no folder gone' in error_of(capsys, PNAC, 'gone', '--out', 'a')
    (tmp_path / 'file').touch()
    write_record(tmp_path / 'w')
    write_log(tmp_path / 'w', '1', [train(1, 1.0)])
    for tool in (PNAC, CHANNELS, OUTLIERS, REPORT, CURVES):
        assert '--out file' in error_of(capsys, tool, 'w', '--out', 'file')
    assert 'neither a record' in error_of(capsys, REPORT, '.', '--out', 'x')


def test_curves(tmp_path, capsys):
    for name in ('a', 'b'):
        write_log(tmp_path / name, '1', [train(10, 5.0), {'accuracy/top1': 20.0, 'step': 1}])
    out = tmp_path / 'new/run.v1'
    run(CURVES, 'a', 'b', '--out', out)
    check_images(out, 'curves.png')
    assert (out / 'curves.csv').read_text().splitlines() == [
        'run,scalar,step,value', 'a,loss,10,5', 'a,accuracy/top1,10,20', 'b,loss,10,5', 'b,accuracy/top1,10,20']
    assert 'loss, accuracy/top1 of 2 runs' in capsys.readouterr().out
    for arguments, message in ((['a', '--keys', 'acc'], 'no log has acc; there are lr, loss, accuracy/top1'),
                               (['a', 'b', 'b/.'], 'is given twice'), (['gone'], 'there is no mmengine log')):
        assert message in error_of(capsys, CURVES, *arguments, '--out', out)


def test_cka_runs_no_code_of_a_checkpoint(classifier, tmp_path, capsys):
    class Code:
        def __reduce__(self):
            return open, (str(tmp_path / 'marker'), 'w')

    torch.save(dict(state_dict={}, code=Code()), 'code.pth')
    config, *_ = classifier
    error = error_of(capsys, CKA, config, 'code.pth', config, 'code.pth', '--out', 'a')
    assert 'code.pth' in error and '--trust-checkpoint' in error and not (tmp_path / 'marker').exists()


@pytest.mark.grid
def test_cka_of_detectors(tmp_path):
    config, options = tiny_runs.write_detector(tmp_path)
    shutil.rmtree(tmp_path / 'coco')
    data_makers.make_coco(tmp_path / 'coco', images=5)
    other = tmp_path / 'ln.py'
    other.write_text(config.read_text().replace('backbone=dict(', "backbone=dict(norm_cfg=dict("
                                                "_delete_=True, type='LN'), ", 1))
    for path in (config, other):
        tiny_runs.save_weights(load_config(str(path), {'pretrained': None}), path.with_suffix('.pth'), ['a'])
    run(CKA, config, config.with_suffix('.pth'), other, other.with_suffix('.pth'), '--out', 'a',
        '--device', 'cpu', '--cfg-options', *options)
    summary = json.loads(Path('a/cka.json').read_text())
    assert summary['batch_size'] == 4 and summary['layers_a'] == summary['layers_b']
    # Of each of the 4 blocks two norms, attention and feed-forward network; 1 + 3 + 4 norms between.
    assert np.shape(summary['cka']) == (24, 24) and np.isfinite(summary['cka']).all()


@pytest.mark.slow
def test_from_training_to_cka_and_the_report(tmp_path, capsys):
    """The whole way on tiny images: two runs that record, CKA between them, with a folded model too, and the page."""
    config = tiny_runs.write_classifier(tmp_path)
    config.write_text(config.read_text() + "custom_hooks = [dict(type='NormStatisticsHook')]\n"
                      "custom_imports = dict(imports=['projects.paper.paper'])\n")
    train_tool = tiny_runs.load_tool('train')
    for name, norm in (('un', "dict(type='UN', warmup_iters=1)"), ('ln', "dict(type='LN')")):
        other = tmp_path / f'{name}.py'
        other.write_text(config.read_text().replace("dict(type='UN', warmup_iters=1)", norm))
        run(train_tool, other, '--cfg-options', 'train_cfg.max_epochs=10', 'default_hooks.checkpoint.interval=10')
        shutil.copyfile(f'work_dirs/{name}/epoch_10.pth', f'{name}.pth')
    record = NormRecord(tmp_path / 'work_dirs/un/norm_statistics')
    assert record.steps.tolist() == list(range(1, 21)) and record.info['config'] == 'un.py'
    assert [layer.norm for layer in record.layers] == ['UN'] * 7
    run(PNAC, 'un.py', '--out', 'pnac')

    def cka(*models, out):
        run(CKA, *models, '--out', out, '--images', '4', '--device', 'cpu')
        return json.loads(Path(out, 'cka.json').read_text())

    summary = cka('un.py', 'un.pth', 'ln.py', 'ln.pth', out='cka')
    assert (summary['model_a'], summary['model_b'], summary['batch_size']) == ('un', 'ln', 4)
    assert np.shape(summary['cka']) == (11, 11)  # 7 norms, 2 attentions, 2 feed-forward networks
    check_images(tmp_path / 'cka', 'cka.png', 'cka_diagonal.png')
    cfg = load_config('un.py')
    model = load_model(cfg, 'un.pth')
    report = fuse_norms(model)
    save_folded(model, 'folded.pth', cfg, report)
    folded = cka('un.py', 'folded.pth', 'un.py', 'un.pth', out='folded')
    assert len(folded['layers_b']) == 11 and not any('norm' in name for name in folded['layers_a'])
    attention = 'backbone.stages.0.blocks.0.attn'
    same = folded['cka'][folded['layers_a'].index(attention)][folded['layers_b'].index(attention)]
    assert same == pytest.approx(1, abs=1e-4)

    run(REPORT, 'work_dirs/un', 'work_dirs/ln', '--out', 'report', '--cka', 'cka')
    page = (tmp_path / 'report/report.html').read_text()
    assert page.count('<img ') == 14 and '://' not in page  # in base64, 'http' may be chance
    numbers = json.loads((tmp_path / 'report/report.json').read_text())
    assert [one['name'] for one in numbers['runs']] == ['un', 'ln'] and len(numbers['cka']) == 1

    # Without running statistics, UN would work, and CKA be a number, but of no model.
    for models, message in ((('un.py', 'ln.pth', 'ln.py', 'ln.pth'), 'the scale but not the statistics of'),
                            (('un.py', 'gone.pth', 'ln.py', 'ln.pth'), 'no checkpoint gone.pth')):
        assert message in error_of(capsys, CKA, *models, '--out', 'none', '--images', '4', '--device', 'cpu')
    with pytest.raises(SystemExit):
        run(CKA, 'un.py', 'un.pth', 'ln.py', 'ln.pth', '--out', 'cka', '--images', '4', '--batch-size', '2')


def test_spread_of_runs_with_and_without_outliers(tmp_path, capsys):
    write_record(tmp_path / 'un'), write_record(tmp_path / 'ln', norm='LayerNorm')
    run(SPREAD, 'un', 'ln', '--out', 'a', '--span', '30')
    rows = read_csv('a/spread.csv')
    assert [row['outlier_steps'] for row in rows] == ['10', '15', '30', 'nan', 'nan', 'nan']
    values = np.log(NormRecord(tmp_path / 'un/norm_statistics').activation(0)[-30:].astype(float))
    deviation = np.median(np.sqrt((np.diff(values, axis=0)**2).mean(axis=0) / 2))
    assert float(rows[0]['spread']) == pytest.approx(deviation, rel=1e-5)
    printed = capsys.readouterr().out
    assert '55 outlier steps of 90' in printed and '0 outlier steps of 0' in printed
    assert 'from 2 to that, got 61' in error_of(capsys, SPREAD, 'un', '--out', 'b', '--span', '61')
