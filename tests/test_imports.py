"""Which packages of mmunorm import which: few, and only downwards."""
import ast
from collections import defaultdict

from .tiny_runs import ROOT

# From the top: each package may import those named, and each is below it in this table.
PACKAGES = {
    'cli': ('benchmark', 'engine', 'deploy', 'config', 'checkpoints'),
    'benchmark': ('deploy', 'conversion', 'config', 'checkpoints', 'fusion', 'norms'),
    'engine': ('conversion', 'config', 'checkpoints', 'fusion', 'norms'),
    'deploy': ('config', 'checkpoints', 'fusion', 'norms'),
    'conversion': ('config', 'fusion', 'norms'),
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


def arrows():
    """The modules of each package that import another one."""
    found = defaultdict(set)
    for path in (ROOT / 'mmunorm').glob('*/**/*.py'):
        source = path.relative_to(ROOT / 'mmunorm').parts[0]
        for parts in imported(path):
            if parts[0] == 'mmunorm' and len(parts) > 1 and (ROOT / 'mmunorm' / parts[1]).is_dir() and (
                    parts[1] != source):
                found[source, parts[1]].add(str(path.relative_to(ROOT)))
    return found


def test_packages_import_few_others_and_only_those_below():
    order, found = [*PACKAGES], arrows()
    assert all(order.index(target) > order.index(source) for source in order for target in PACKAGES[source])
    assert {arrow: paths for arrow, paths in found.items() if arrow[1] not in PACKAGES.get(arrow[0], ())} == {}
    assert len(found) <= 30


def test_projects_are_not_imported():
    for path in (ROOT / 'mmunorm').rglob('*.py'):
        assert not any(parts[0] == 'projects' for parts in imported(path)), path
