"""Fold rules and their registry.

The target of a norm is found by running the model. A rule states for a class what a run cannot show: how to run the
model, how to fill zero padding, and which norms fold jointly, by the names of submodules.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from .folds import JointFold, Pad


class Example:
    """How to run the whole model, so that :func:`mmunorm.fuse_norms` needs no example.

    Each of `runs` is a function that takes the model, runs it and returns the outputs to compare. The first that
    succeeds is used, so they may try several image sizes.
    """

    def __init__(self, *runs: Callable[[nn.Module], object]):
        self.runs = runs


@dataclass(frozen=True)
class Fills:
    """The module pads its input with zeros; `pad(module, fill)` returns one that pads with another token, of the class
    :class:`mmunorm.fusion.padding.Fill`."""
    pad: Pad


Fact = Example | Fills | JointFold
Rule = Callable[[nn.Module], Iterable[Fact]]

_RULES: dict[type[nn.Module] | str, tuple[Rule, tuple[str, ...]]] = {}


def fold_rule(*classes: type[nn.Module] | str, methods: tuple[str, ...] = ('forward', )) -> Callable[[Rule], Rule]:
    """Registers a function as the fold rule of one or more module classes.

    The function takes a module and returns its facts. The rule of a class also applies to subclasses that override none
    of `methods`; the rule of the nearest class wins. It does not apply to an instance whose `methods` have been
    replaced.

    Args:
        *classes: classes, or their full names such as 'timm.models.swin_transformer.PatchMerging', so that
            a rule need not import that library. The name of a package means all classes in it.
        methods: the methods that the rule describes. Defaults to `('forward', )`.

    Raises:
        TypeError: one of `classes` is neither a module class nor a full name.
    """
    for cls in classes:
        is_class = isinstance(cls, type) and issubclass(cls, nn.Module)
        if not is_class and not (isinstance(cls, str) and '.' in cls):
            raise TypeError(f'classes: must be nn.Module classes or their full names, got {cls!r}')

    def register(rule: Rule) -> Rule:
        _RULES.update((cls, (rule, methods)) for cls in classes)
        return rule

    return register


def facts(module: nn.Module) -> list[Fact]:
    """The facts of the rule for `module`'s class; empty without a rule."""
    for cls in type(module).__mro__:
        package = cls.__module__.rpartition('.')[0]
        found = (_RULES.get(key) for key in (cls, f'{cls.__module__}.{cls.__qualname__}', package))
        rule, methods = next(filter(None, found), (None, ()))
        if rule is not None:
            # An instance attribute overrides the method of the class.
            is_as_described = all(getattr(type(module), method) is getattr(cls, method) and method not in vars(module)
                                  for method in methods)
            return list(rule(module)) if is_as_described else []
    return []
