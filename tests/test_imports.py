"""Which packages of mmunorm import which: few, and only downwards; and what an import changes: nothing."""
import ast
import subprocess
import sys
import textwrap
from collections import defaultdict

import pytest

from .tiny_runs import ROOT

# From the top: each package may import those named, and each is below it in this table.
PACKAGES = {
    'cli': ('benchmark', 'engine', 'deploy', 'config', 'checkpoints'),
    'benchmark': ('deploy', 'config', 'checkpoints', 'fusion', 'norms'),
    'engine': ('conversion', 'config', 'checkpoints', 'fusion', 'norms'),
    'deploy': ('config', 'checkpoints', 'fusion', 'norms'),
    'conversion': ('fusion', 'norms'),
    'config': ('checkpoints', 'norms'),
    'checkpoints': ('fusion', 'norms'),
    'backbones': ('fusion', 'norms'),
    'fusion': ('norms', ),
    'norms': (),
    'ops': (),
}


def imported(path):
    """The packages of mmunorm that a module imports, inside functions as well."""
    package = ('mmunorm', *path.relative_to(ROOT / 'mmunorm').parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parts = (*package[:len(package) + 1 - node.level], *(node.module or '').split('.')) if node.level else (
                tuple((node.module or '').split('.')))
            for alias in node.names:
                yield (*filter(None, parts), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split('.'))


def test_packages_import_few_others_and_only_those_below():
    order, found = [*PACKAGES], defaultdict(set)  # the modules of each package that import another one
    assert {path.parent.name for path in (ROOT / 'mmunorm').glob('*/__init__.py')} == {*order}
    assert all(order.index(target) > order.index(source) for source in order for target in PACKAGES[source])
    for path in (ROOT / 'mmunorm').rglob('*.py'):
        source = path.relative_to(ROOT / 'mmunorm').parts[0]
        for parts in imported(path):
            assert parts[0] != 'projects', path
            if parts[0] == 'mmunorm' and {*parts[1:2]} & PACKAGES.keys() - {source} and source in PACKAGES:
                found[source, parts[1]].add(str(path.relative_to(ROOT)))
    assert {arrow: paths for arrow, paths in found.items() if arrow[1] not in PACKAGES[arrow[0]]} == {}
    assert len(found) <= 28


TOOLS = sorted(path for pattern in ('tools/*.py', 'tools/*/*.py', 'projects/*/tools/*.py')
               for path in ROOT.glob(pattern))


def test_no_tool_hides_a_module_of_python():
    """A script's folder comes first on sys.path."""
    names = {path.stem for path in TOOLS}
    assert len(names) > 10 and not names & sys.stdlib_module_names


def test_a_tool_imports_mmunorm_before_other_packages():
    for tool in TOOLS:
        names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                 for node in ast.parse(tool.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        packages = [name.partition('.')[0] for name in names]
        assert next((name for name in packages if name not in sys.stdlib_module_names), 'mmunorm') == 'mmunorm', tool


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
        # torch's own list of classes that a file may hold, to which the mark of folded files is added.
        listed = 'torch._weights_only_unpickler', '_marked_safe_globals_set'
        assert {*changed} <= {listed}, changed
        from mmunorm.fusion.layers import FoldedAway
        assert {*after.get(listed, ())} - {*before.get(listed, ())} <= {FoldedAway}
        assert all(entry in warnings.filters for entry in filters)
        assert all(finder.__module__ == "mmunorm.ops" for finder in sys.meta_path if finder not in finders)
        import mmdet.datasets
        for name, module in sys.modules.items():
            assert vars(module).get('print_log', logging.print_log) is logging.print_log, name
    ''')
    shown = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=True,
                           cwd=ROOT).stdout.splitlines()
    # mmdet's own messages stay.
    assert set(shown[shown.index('from here') + 1:]) <= {'Could not import OneDL. Skipping OneDL datasets.'}
