"""Configs from untrusted files: parsed as plain data, and built only from safe registered types."""
from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from unittest import mock

from mmengine.config import Config
from mmengine.config.utils import MODULE2PACKAGE
from mmengine.registry import registry

from ..utils import PreflightError

# Registered types in these modules evaluate text, or read other files and models.
_REFUSED = ('mmdet.models.task_modules.tracking', 'mmdet.models.mot', 'mmdet.models.language_models',
            'mmpretrain.models.multimodal', 'mmpretrain.models.retrievers',
            'mmpretrain.models.classifiers.hugging_face', 'mmpretrain.models.utils.huggingface')


def read_config_text(text: str) -> dict:
    """Parses the text of a self-contained config, as mmengine writes it, without executing it.

    Raises:
        ValueError: a line is not `NAME = VALUE` with a literal of numbers, strings, lists, tuples, sets and dicts; the
            message has the line number.
    """
    settings, line = {}, 0
    try:
        for statement in ast.parse(text).body:
            line = statement.lineno
            if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
                raise ValueError
            name = statement.targets[0]
            if not isinstance(name, ast.Name):
                raise ValueError
            settings[name.id] = ast.literal_eval(_WithoutDictCalls().visit(statement.value))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        line = getattr(error, 'lineno', line)
        raise ValueError(f'line {line} of the config is not `NAME = VALUE` with a literal value') from None
    return settings


class _WithoutDictCalls(ast.NodeTransformer):
    """Turns `dict(a=1)` and `dict({'a': 1})` into `{'a': 1}`. literal_eval rejects other calls."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id != 'dict':
            return node
        if not node.keywords and len(node.args) == 1 and isinstance(node.args[0], ast.Dict):
            return node.args[0]
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return node
        return ast.Dict([ast.Constant(keyword.arg) for keyword in node.keywords],
                        [keyword.value for keyword in node.keywords])


@contextmanager
def registered_types_only() -> Iterator[None]:
    """A context in which mmengine builds configs only from registered types that do not execute their arguments.

    Without it, mmengine imports and calls any `type` that is not registered: `type='os.system'` runs a command. It
    also imports `NAME.registry` for each scope in a config. Some registered types evaluate a string or execute the
    config file of a teacher.

    Raises:
        PreflightError: a type or a config file could execute code.
    """
    get = registry.Registry.get

    def get_harmless(self, key: str):
        found = get(self, key)
        if getattr(found, '__module__', '').startswith(_REFUSED):
            raise PreflightError(f'the config names the type {key}, which may run text or read other files.')
        return found

    def refuse(path, *args, **kwargs):
        raise PreflightError(f'the config names the config file {path}, which is code.')

    def import_known(name: str):
        if not is_known_scope(name.partition('.')[0]):
            raise ImportError(name)
        return import_module(name)

    with mock.patch.object(registry, 'get_object_from_string', lambda name: None), \
            mock.patch.object(registry, 'import_module', import_known), \
            mock.patch.object(registry.Registry, 'get', get_harmless), \
            mock.patch.object(Config, 'fromfile', refuse):
        yield


def is_known_scope(name: str) -> bool:
    """Whether a scope is a package of OpenMMLab's, or one that somebody has imported."""
    return name in MODULE2PACKAGE or name in sys.modules
