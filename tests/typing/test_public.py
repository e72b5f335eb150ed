import ast
from pathlib import Path

import mmunorm


def test_every_public_name_is_type_checked():
    tree = ast.parse((Path(__file__).parent / 'public.py').read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == 'mmunorm'
                for name in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    norms = {name for name in mmunorm.norms.__all__ if isinstance(getattr(mmunorm, name), type)}
    assert imported & used >= set(mmunorm.__all__) - norms | {'UN'}
