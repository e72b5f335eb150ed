"""What a fold rule says, and the one registry of them.

Where a norm goes is found out by a run of the model. A rule says of a class what a run cannot show, by the names of its
parts: how the model is run, how zero padding is filled, where norms stand in a residual stream.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from .padding import Fill

Pad = Callable[[nn.Module, Fill], None]


class Example:
    """Ways to run the whole model, for which :func:`mmunorm.fuse_norms` needs no example.

    Each of `runs` is a function that runs the model that it is given and returns what is to be compared. The first
    that runs counts: they may be images of sizes of which the model takes some.
    """

    def __init__(self, *runs: Callable[[nn.Module], object]):
        self.runs = runs


@dataclass(frozen=True)
class Fills:
    """The module pads its input with zeros; `pad(module, fill)` makes it put another token in their place.

    `fill` is a :class:`mmunorm.fusion.padding.Fill`.
    """
    pad: Pad


class Station(NamedTuple):
    """A sublayer F of a post-norm stream, `x' = norm(a x + b F(x))`, by the names of its parts.

    `residual` is the module that adds, with `scales() -> (a, b)` and `without_factors()`, what is left of it once they
    are folded. `part` is F, and `last` the linear layer in it that gives its output.
    """
    residual: str
    part: str
    last: str
    norm: str

    def within(self, prefix: str) -> Station:
        """The same with full names, for a module with the name `prefix`."""
        return Station(*(join(prefix, name) for name in self))


@dataclass(frozen=True)
class Stream:
    """The residual stream of post-norm layers, whose norms stand in it, after the sums.

    `stations` are its sublayers in order. `ends` are norms that read the stream at its end, over its channels or over
    several copies of each in a row.
    """
    stations: tuple[Station, ...]
    ends: tuple[str, ...] = ()

    def within(self, prefix: str) -> Stream:
        """The same with full names, for a module with the name `prefix`."""
        return Stream(tuple(station.within(prefix) for station in self.stations),
                      tuple(join(prefix, end) for end in self.ends))


@dataclass(frozen=True)
class Factor:
    """Module `residual`, one of :class:`Station`, multiplies the output of layer `last` by b, which can go in there.

    So it is where the modules `between` the two do nothing, for example since the norms there are folded.
    """
    residual: str
    last: str
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unties:
    """`layer` may share its weight with others, which stay as they are: it gets a copy when a norm goes into it."""
    layer: str


Fact = Example | Fills | Stream | Factor | Unties
Rule = Callable[[nn.Module], Iterable[Fact]]

_RULES: dict[type[nn.Module] | str, tuple[Rule, tuple[str, ...]]] = {}


def fold_rule(*classes: type[nn.Module] | str, methods: tuple[str, ...] = ('forward', )) -> Callable[[Rule], Rule]:
    """Registers a function as the fold rule of one or several classes of modules.

    The rule of a class serves its subclasses too, as long as they override none of `methods`; the rule of the nearest
    class wins. An instance whose `methods` have been replaced has no rule. For a model of one's own::

        from mmunorm.fusion import Example, fold_rule

        @fold_rule(MyDetector)
        def my_detector(model):
            yield Example(lambda model: model.extract_feat(torch.randn(1, 3, 64, 64)))

    Args:
        *classes: classes, or their full names such as 'timm.models.swin_transformer.PatchMerging', so that
            a rule need not import the library it is for. The name of a package stands for all classes in it.
        methods: the methods that the rule describes. Defaults to `('forward', )`.

    Raises:
        TypeError: one of `classes` is neither a class of modules nor a full name. A full name of no class is an
            error of :func:`mmunorm.fuse_norms`, once the module that it names is imported.
    """
    for cls in classes:
        is_class = isinstance(cls, type) and issubclass(cls, nn.Module)
        if not is_class and not (isinstance(cls, str) and '.' in cls):
            raise TypeError(f'classes: must be nn.Module classes or their full names, got {cls!r}')

    def register(rule: Rule) -> Rule:
        _RULES.update((cls, (rule, methods)) for cls in classes)
        return rule

    return register


def check_names() -> None:
    """A NameError if a class that a rule names does not exist, where its module is imported."""
    for name, (rule, _) in _RULES.items():
        module, _, last = str(name).rpartition('.')
        if isinstance(name, str) and module in sys.modules and not hasattr(sys.modules[module], last):
            raise NameError(f'the fold rule {rule.__name__} ({rule.__module__}) is for {name}, and there is no such '
                            'class')


def facts(module: nn.Module) -> list[Fact]:
    """What the rule for `module`'s class says about it; nothing where there is none."""
    for cls in type(module).__mro__:
        package = cls.__module__.rpartition('.')[0]
        found = (_RULES.get(key) for key in (cls, f'{cls.__module__}.{cls.__qualname__}', package))
        rule, methods = next(filter(None, found), (None, ()))
        if rule is not None:
            # A method of the instance alone hides that of its class.
            is_as_described = all(getattr(type(module), method) is getattr(cls, method) and method not in vars(module)
                                  for method in methods)
            return list(rule(module)) if is_as_described else []
    return []


def join(prefix: str, name: str) -> str:
    """The full name of a part of the module `prefix`."""
    return '.'.join(filter(None, (prefix, name)))
