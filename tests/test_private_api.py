"""Private names of other packages that we use: listed in docs/compatibility.md, and still there."""
import ast
import importlib
import inspect
import re

import pytest

from . import tiny_runs

PAGE = (tiny_runs.ROOT / 'docs/compatibility.md').read_text()
SECTION = PAGE.split('## Private API of other packages')[1].split('\n## ')[0]
LISTED = [name for row in re.findall(r'^\| (`.*?) \|', SECTION, re.M) for name in re.findall(r'`([\w.]+)`', row)]


@pytest.mark.parametrize('name', LISTED)
def test_it_is_still_there(name):
    pytest.importorskip(name.partition('.')[0])
    found, path = None, ''
    for part in name.split('.'):
        path = f'{path}.{part}'.lstrip('.')
        if hasattr(found, part):
            found = getattr(found, part)
        elif inspect.isclass(found) or inspect.isfunction(found):  # an attribute of what it makes
            assert f'.{part} ' in inspect.getsource(found)
        else:
            found = importlib.import_module(path)


def test_nothing_private_is_used_that_is_not_listed():
    defined, used = {'_asdict', '_replace', '_exit'}, {}  # a NamedTuple's and os._exit are documented
    for path in (tiny_runs.ROOT / 'mmunorm').rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Store) and getattr(node.value, 'id', '') in ('self', 'cls'):
                    defined.add(node.attr)
                used.setdefault(node.attr, path.name)
            elif isinstance(node, ast.Call) and getattr(node.func, 'attr', '') == 'register_buffer':
                defined.add(ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else '')
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [*(node.module or '').split('.'), *(alias.name for alias in node.names)]
                used.update(dict.fromkeys(names, path.name))
    private = {name: path for name, path in used.items() if re.match(r'_[a-zA-Z]', name)}
    listed = {part for name in LISTED for part in name.split('.')}
    assert {name: path for name, path in private.items() if name not in defined | listed} == {}
