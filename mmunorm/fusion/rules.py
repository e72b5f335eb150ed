"""What a fold rule says, and the one registry of them.

A rule looks at one module and yields facts about its norms or its inputs and outputs, by the names of its parts.
`find` joins the facts.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pydoc import ErrorDuringImport, locate
from typing import NamedTuple

from torch import nn

from .padding import Fill

Pad = Callable[[nn.Module, Fill], None]


class Into:
    """`norm` is read by `readers` and by nothing else: it goes into their weights.

    A reader is a linear layer, an unpadded convolution, or a module whose own rule tells by `Reads` what reads its
    input. `pad(module, fill)` is for a module that pads with zeros between the norm and its one reader: it makes the
    module put `fill` (:class:`mmunorm.fusion.padding.Fill`) in their place. `identity` says that the readers are
    called with an `identity` of their own, as mmcv's FFN can be.
    """

    def __init__(self, norm: str, *readers: str, pad: Pad | None = None, identity: bool = False):
        self.norm, self.readers, self.pad, self.identity = norm, readers, pad, identity


@dataclass(frozen=True)
class After:
    """`norm` goes back into `source`, the linear layer or convolution before it, whose output nothing else reads."""
    norm: str
    source: str


@dataclass(frozen=True)
class Emits:
    """Output `level` of the module, -1 for the last, is the output of `norm`, which nothing inside it reads.

    The rule of the model that holds the module says by `Chain` who reads it.
    """
    norm: str
    level: int = -1


class Reads:
    """Input `level` of the module, -1 for the last, is read by `readers` and by nothing else.

    `pad` is for a module that pads its input with zeros before it is read, as in `Into`. `adds_input` is for one that
    also adds its input to its output, unless it is called with another `identity`.
    """

    def __init__(self, *readers: str, level: int = -1, pad: Pad | None = None, adds_input: bool = False):
        self.readers, self.level, self.pad, self.adds_input = readers, level, pad, adds_input


@dataclass(frozen=True)
class Averages:
    """Each output of the module is a mean over positions of one input: scale and shift pass through it."""


class Chain:
    """The outputs of each of `parts` are the inputs of the next, and are read nowhere else."""

    def __init__(self, *parts: str):
        self.parts = parts


@dataclass(frozen=True)
class Stays:
    """`norm` cannot be folded, because of `why`, half a sentence."""
    norm: str
    why: str


class Station(NamedTuple):
    """A sublayer F of a post-norm stream, `x' = norm(a x + b F(x))`, by the names of its parts.

    `residual` is the module that adds, with `scales() -> (a, b)` and `without_factors()`, what is left of it once
    they are folded. `part` is F, and `last` the linear layer in it that gives its output.
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

    `stations` are its sublayers in order. What reads the stream at its end are the norms `ends`, over its channels or
    over several copies of each in a row; without any, the rule says by `Emits` that the last norm is an output. `pads`
    are for ends in modules that pad the stream with zeros: pairs of a module and a function, as in `Into`.
    """
    stations: tuple[Station, ...]
    ends: tuple[str, ...] = ()
    pads: tuple[tuple[str, Pad], ...] = ()

    def within(self, prefix: str) -> Stream:
        """The same with full names, for a module with the name `prefix`."""
        return Stream(tuple(station.within(prefix) for station in self.stations),
                      tuple(join(prefix, end) for end in self.ends),
                      tuple((join(prefix, name), pad) for name, pad in self.pads))


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


Fact = Into | After | Emits | Reads | Averages | Chain | Stays | Stream | Factor | Unties
Rule = Callable[[nn.Module], Iterable[Fact]]

_RULES: dict[type[nn.Module] | str, tuple[Rule, tuple[str, ...]]] = {}


def fold_rule(*classes: type[nn.Module] | str, methods: tuple[str, ...] = ('forward', )) -> Callable[[Rule], Rule]:
    """Registers a function as the fold rule of one or several classes of modules.

    The rule of a class serves its subclasses too, as long as they override none of `methods`; the rule of the nearest
    class wins. An instance whose `methods` have been replaced has no rule. For a block of one's own::

        from mmunorm.fusion import Into, fold_rule

        @fold_rule(MyBlock)
        def my_block(block):
            yield Into('norm', 'attn.query', 'attn.key', 'attn.value')

    Args:
        *classes: classes, or their full names such as 'timm.models.swin_transformer.PatchMerging', so that
            a rule need not import the library it is for.
        methods: the methods that the rule describes. Defaults to `('forward', )`.

    Raises:
        TypeError: one of `classes` is neither a class of modules nor a full name. A full name of no class is an
            error of :func:`mmunorm.fuse_norms`, once the package that it names is imported.
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
    """A NameError if a class that a rule names does not exist, where its package is imported."""
    for name, (rule, _) in _RULES.items():
        if isinstance(name, str) and name.partition('.')[0] in sys.modules:
            with suppress(ErrorDuringImport):  # something that the package needs is missing
                if locate(name) is None:
                    raise NameError(f'the fold rule {rule.__name__} ({rule.__module__}) is for {name}, and there is '
                                    'no such class')


def facts(module: nn.Module) -> list[Fact] | None:
    """What the rule for `module`'s class says about it; None where there is none, or it is for another `forward`."""
    for cls in type(module).__mro__:
        rule, methods = _RULES.get(cls) or _RULES.get(f'{cls.__module__}.{cls.__qualname__}') or (None, ())
        if rule is not None:
            # A method of the instance alone hides that of its class.
            is_as_described = all(getattr(type(module), method) is getattr(cls, method) and method not in vars(module)
                                  for method in methods)
            return list(rule(module)) if is_as_described else None
    return None


def join(prefix: str, name: str) -> str:
    """The full name of a part of the module `prefix`."""
    return '.'.join(filter(None, (prefix, name)))
