import base64
import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from projects.paper.paper import RecordError
from projects.paper.paper.page import build_report, read_cka
from projects.paper.paper.work_dirs import measure_work_dir, read_work_dirs, report_numbers

from .logs import train, write_log
from .records import NAMES, write_record

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')


CKA = dict(model_a='ln', model_b='un', label='ln and un', layers_a=NAMES, layers_b=NAMES, cka=np.eye(3).tolist())


def log(folder, loss):
    write_log(folder, '1', [*(train(step, loss / step) for step in range(10, 70, 10)),
                            {'accuracy/top1': 80 + loss, 'step': 1}])


def measure(*folders):
    return [measure_work_dir(run) for run in read_work_dirs(folders)]


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    folders = [write_record(folder / 'ln', norm='LayerNorm'), write_record(folder / '<un> & "co"')]
    for i, folder in enumerate(folders):
        log(folder, i + 1)
    return measure(*folders)


@pytest.fixture(scope='module')
def report(measured):
    return build_report(measured, [CKA])


def test_the_page_is_whole_and_needs_nothing(report):
    for tag in re.findall(r'<(\w+)', re.sub(r'<(meta|img)[ >]', '', report)):
        assert len(re.findall(rf'<{tag}[ >]', report)) == report.count(f'</{tag}>'), tag
    for foreign in ('<script', '<link', '<a ', 'url(', '@import'):
        assert foreign not in report
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in report
    assert '@media print' in report and 'prefers-color-scheme: dark' in report
    images = re.findall(r'<img src="data:image/png;base64,(.*?)" width="\d+" height="\d+" alt="[^"]+">', report)
    # Loss, accuracy; PNAC mean, 2 by layer, 2 densities; channels; means; outliers of UN alone; CKA, its diagonal.
    assert len(images) == report.count('<img') == 2 + 5 + 2 + 2 + 1 + 2
    assert all(base64.b64decode(data).startswith(b'\x89PNG') for data in images)
    text = html.unescape(report)
    for words in ('some_config.py', 'LayerNorm', '<un> & "co"', '81 / 81', '82 / 82', '60, from step 1 to 60',
                  'ln (LayerNorm): no layer has an outlier filter', NAMES[2]):
        assert words in text
    assert '<un>' not in report
    rows = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td></tr>', report)
    table = {label: cells for label, *cells in rows}
    # 10, 15 and 30 outlier steps of 60.
    assert table['outlier steps, share (%)'] == ['–', '30.6']
    assert table['last logged step'] == ['60', '60']


def test_a_run_with_a_log_alone_or_a_short_record(tmp_path):
    log(tmp_path / 'log', 1)
    write_record(tmp_path / 'short', steps=3)
    page = build_report(measure(tmp_path / 'log', tmp_path / 'short'))
    assert 'at least 20 steps' in page and 'fewer than 4 steps' in page
    with pytest.raises(RecordError, match='a span has 50'):
        measure_work_dir(*read_work_dirs([write_record(tmp_path / 'r', steps=30)]), span=50)


def test_a_config_is_named_and_not_run(tmp_path):
    """A work directory may be from another user."""
    folder = tmp_path / 'run'
    log(folder, 1)
    (folder / 'un.py').write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    run, = read_work_dirs([folder])
    assert run.config_name == 'un.py' and not (tmp_path / 'marker').exists()


def test_folders_that_are_no_runs(tmp_path):
    run = write_record(tmp_path / 'run')
    for given, message in (([tmp_path / 'gone'], 'no work directory'), ([tmp_path], 'neither a record'),
                           ([run, run], 'given twice')):
        with pytest.raises(RecordError, match=message):
            read_work_dirs(given)
    with pytest.raises(RecordError, match='there is no'):
        read_cka([tmp_path / 'gone.json'])
    for content in ([1], {**CKA, 'cka': [[1], [1, 2], [1, 2, 3]]}, {**CKA, 'cka': [[1]]}):
        (tmp_path / 'cka.json').write_text(json.dumps(content))
        with pytest.raises(RecordError, match='is not a cka.json'):
            read_cka([tmp_path])


def test_cka_of_the_same_models_twice(tmp_path):
    """Such as of two checkpoints of a run: each has a line."""
    for i, name in enumerate(('early', 'late', 'other')):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'cka.json').write_text(json.dumps(
            {**CKA, 'cka': np.full((3, 3), i / 2).tolist(), 'model_b': 'bn' if name == 'other' else 'un'}))
    summaries = read_cka([tmp_path / 'early', tmp_path / 'late/cka.json', tmp_path / 'other'])
    labels = ['ln and un (early)', 'ln and un (late)', 'ln and bn']
    assert [summary['label'] for summary in summaries] == labels
    assert f'alt="Linear CKA at equal depth of {"; ".join(labels)}"' in build_report([], summaries)
    with pytest.raises(RecordError, match='given twice'):
        read_cka([tmp_path / 'early', tmp_path / 'early/cka.json'])


def test_numbers_in_json(measured):
    numbers = json.loads(json.dumps(report_numbers(measured, [CKA]), allow_nan=False))
    ln, un = numbers['runs']
    assert (ln['name'], ln['norms'], ln['config']) == ('ln', 'LayerNorm', 'some_config.py')
    assert ln['last_and_best'] == {'accuracy/top1': [81, 81]} and ln['last_logged_step'] == 60
    assert un['curves']['loss'] == [[step, 2 / step] for step in range(10, 70, 10)]
    assert un['recorded'] == dict(steps=60, first=1, last=60, layers=NAMES)
    np.testing.assert_array_equal(un['pnac']['activation_percent'][0][:2],
                                  measured[1].pnac.percent('activation')[0][:2])
    assert un['pnac']['activation_percent'][0][2] is None  # constant
    assert (un['pnac']['first_steps'], un['pnac']['last_steps'], un['pnac']['span']) == ([1], [60], 60)
    assert len(un['channels']) == 6 and len(un['channels'][0]['values']) == 60
    assert un['channels'][0]['gm'][:3] == [None] * 3  # before there are as many steps
    assert un['outliers']['counts'][-1] == [10, 15, 30] and un['outliers']['layers'] == NAMES
    assert un['outlier_share'] == pytest.approx(55 / 180) and ln['outliers'] is None
    shares = un['mean_shares']
    assert shares['steps'] == [1] and shares['layers'] == NAMES
    np.testing.assert_allclose(shares['highest_channel'], [[0.5] * 3], rtol=1e-6)
    np.testing.assert_allclose(shares['all_channels'][0][2], 1 / 6, rtol=1e-6)  # where all mean squares are 1
    assert numbers['cka'] == [CKA]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium')
@pytest.mark.parametrize('width', [390, 1400])
def test_a_browser_shows_it_without_scrolling_sideways(report, tmp_path, width):
    # The page runs no script; this copy prints its size.
    page = report.replace('</body>', (
        '<script>document.title = [document.documentElement.scrollWidth, innerWidth,'
        ' [...document.images].filter(image => image.naturalWidth).length].join()</script></body>'))
    inner, outer = tmp_path / 'page.html', tmp_path / 'frame.html'
    inner.write_text(page)
    # A window has a minimum width; a frame has none.
    outer.write_text(f'<iframe src="page.html" style="width:{width}px;height:900px;border:0"></iframe>'
                     '<script>onload = () => document.body.append(frames[0].document.title)</script>')
    result = subprocess.run(
        [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-sync',
         '--disable-background-networking', '--disable-component-update', '--disable-quic',
         '--allow-file-access-from-files', f'--user-data-dir={tmp_path / "profile"}', '--dump-dom',
         f'file://{outer}'], capture_output=True, text=True, timeout=120)
    found = re.search(r'(\d+),(\d+),(\d+)', re.sub(r'<script>.*?</script>', '', result.stdout))
    assert found, result.stderr[-500:]
    needed, given, images = map(int, found.groups())
    assert needed <= given == width and images == 14
