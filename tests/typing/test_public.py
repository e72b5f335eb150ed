import ast
from pathlib import Path

import mmunorm


def test_every_public_name_is_type_checked():
    tree = ast.parse((Path(__file__).parent / 'public.py').read_text())
    used = {node.attr for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and getattr(node.value, 'id', '') == 'mmunorm'}
    norms = {name for name in mmunorm.norms.__all__ if isinstance(getattr(mmunorm, name), type)}
    assert used >= set(mmunorm.__all__) - norms | {'UN'}
