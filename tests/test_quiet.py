"""The terminal output of tools."""
import ast
import subprocess
import sys
import textwrap

import mmengine.logging
import pytest
from pycocotools.coco import COCO

from mmunorm.cli.arguments import command
from mmunorm.utils import quiet_imports

from . import data_makers, tiny_runs

CHATTER = ('OneDL', 'Hooks will be executed', 'System environment', 'custom_hooks', 'FileClient', 'Deprecat')


@pytest.mark.slow
def test_a_run_shows_what_concerns_its_user_and_its_log_has_all(classifier, tmp_path):
    train = tiny_runs.ROOT / 'tools/train.py'
    shown = subprocess.run([sys.executable, train, classifier[0], '--work-dir', tmp_path / 'w', '--cfg-options',
                            'model.backbone.norm_cfg.warmup_iters=100'], capture_output=True, text=True, check=True)
    assert not any(word in shown.stdout + shown.stderr for word in CHATTER)
    first, second, *others = shown.stdout.splitlines()
    assert 'ImageClassifier; backbone UNSwinTransformer; norms: 7 UN' in first
    assert str(tmp_path / 'w') in second
    assert 'UN never leaves its warm-up in this run' in shown.stdout
    assert len(others) < 9 and 'accuracy/top1' in others[-1] and not shown.stderr
    log, = (tmp_path / 'w').rglob('*.log')
    assert all(word in log.read_text() for word in CHATTER[1:4])


def test_verbose_shows_all_also_what_the_import_has_held_back(classifier, in_a_folder, capsys):
    with quiet_imports():
        mmengine.logging.print_log('Could not import OneDL')
        mmengine.logging.print_log('something else')
    for argv in [], ['--verbose']:
        command(lambda argv: print('main'))(argv)
    first, second, *others, last = capsys.readouterr().out.splitlines()
    assert (first, second, last) == ('something else', 'main', 'main')
    assert 'Could not import OneDL' in others
    tiny_runs.call('train', classifier[0], '--verbose')
    shown = capsys.readouterr().out
    assert all(word in shown for word in CHATTER[1:4])


def test_annotations_are_read_silently(tmp_path, capsys):
    data_makers.make_coco(tmp_path, splits=['train2017'])
    for argv in [], ['--verbose']:
        command(lambda _: COCO(tmp_path / 'annotations/instances_train2017.json'))(argv)
        assert ('index created!' in capsys.readouterr().out) == bool(argv)


def test_progress_bars_stay_out_of_logs():
    """Where stderr is no terminal, `disable=None` leaves a bar out; tqdm draws it by default."""
    paths = [path for folder in ('mmunorm', 'tools') for path in (tiny_runs.ROOT / folder).rglob('*.py')]
    calls = [node for path in paths if 'tqdm(' in path.read_text() for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == 'tqdm']
    assert len(calls) > 5
    for call in calls:
        values = [ast.unparse(word.value) for word in call.keywords if word.arg == 'disable']
        assert values and 'None' in values[0], ast.unparse(call)


@pytest.mark.slow
def test_importing_it_changes_nothing_in_other_packages():
    """Every name of every module and class that is there already means the same afterwards.

    Neither does a module that is imported on the way keep a function of ours: they keep what they import by name.
    """
    code = textwrap.dedent('''
        import sys
        import warnings
        import mmengine.runner, mmcv, mmpretrain.models, mmpretrain.datasets, mmpretrain.engine  # noqa: E401
        from mmengine import logging

        def snapshot():
            found = {}
            for name, module in sys.modules.copy().items():
                if name.partition('.')[0] in ('mmunorm', '__main__', '__mp_main__'):
                    continue
                for key, value in list(vars(module).items()):
                    found[name, key] = value
                    if type(value) is type and value.__module__ == name:
                        found.update({(name, key, inner): value for inner, value in vars(value).items()})
            return found

        before, filters, finders = snapshot(), [*warnings.filters], [*sys.meta_path]
        print('from here')
        import mmunorm
        import mmunorm.cli.arguments
        after = snapshot()
        changed = [key for key, value in before.items() if key not in after or after[key] is not value]
        assert not changed, changed
        assert all(entry in warnings.filters for entry in filters)
        assert all(finder.__module__ == "mmunorm.ops" for finder in sys.meta_path if finder not in finders)
        import mmdet.datasets
        for name, module in sys.modules.items():
            assert vars(module).get('print_log', logging.print_log) is logging.print_log, name
    ''')
    shown = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=True,
                           cwd=tiny_runs.ROOT).stdout.splitlines()
    # mmdet's own messages stay.
    assert set(shown[shown.index('from here') + 1:]) <= {'Could not import OneDL. Skipping OneDL datasets.'}
