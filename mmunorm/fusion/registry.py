"""What a fold rule says, and the one registry of them.

A rule looks at one module and yields facts about its norms or its inputs and outputs, by the names of its
parts. Nothing is folded here: :func:`mmunorm.fuse_norms` joins the facts, checks each against the layers it
names, and only then changes the model.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module

from torch import nn

from .padding import Fill

Pad = Callable[[nn.Module, Fill], None]


@dataclass(init=False)
class Into:
    """`norm` is read by `readers` and by nothing else: it goes into their weights.

    A reader is a linear layer, an unpadded convolution, or a module whose own rule tells by `Reads` what
    reads its input.

    `pad(module, fill)` is for a module that pads with zeros between the norm and its reader: it makes the
    module put `fill` (:class:`mmunorm.fusion.padding.Fill`) in their place. There is one reader only then.

    `identity` says that the readers are called with an `identity` of their own, as mmcv's FFN can be.
    """
    norm: str
    readers: tuple[str, ...]
    pad: Pad | None
    identity: bool

    def __init__(self, norm: str, *readers: str, pad: Pad | None = None, identity: bool = False):
        self.norm = norm
        self.readers = readers
        self.pad = pad
        self.identity = identity


@dataclass(frozen=True)
class Behind:
    """`norm` reads `source`, a linear layer or convolution whose output nothing else reads: it goes there."""
    norm: str
    source: str


@dataclass(frozen=True)
class Emits:
    """Output `level` of the module is that of `norm`, which nothing inside the module reads.

    Levels count from the last, which is -1. The rule of the model that holds the module says by `Chain` who
    reads it.
    """
    norm: str
    level: int = -1


@dataclass(init=False)
class Reads:
    """Input `level` of the module is read by `readers` and by nothing else. Levels count from the last, -1.

    `pad` is for a module that pads its input with zeros before it is read, as in `Into`. `adds_input` is for
    one that also adds its input to its output, unless it is called with another `identity`.
    """
    readers: tuple[str, ...]
    level: int
    pad: Pad | None
    adds_input: bool

    def __init__(self, *readers: str, level: int = -1, pad: Pad | None = None, adds_input: bool = False):
        self.readers = readers
        self.level = level
        self.pad = pad
        self.adds_input = adds_input


@dataclass(frozen=True)
class Averages:
    """Each output of the module is a mean over positions of one input: scale and shift pass through it."""


@dataclass(init=False)
class Chain:
    """The outputs of each of `parts` are the inputs of the next, and are read nowhere else."""
    parts: tuple[str, ...]

    def __init__(self, *parts: str):
        self.parts = parts


@dataclass(frozen=True)
class Stays:
    """`norm` cannot be folded, because of `why`, half a sentence."""
    norm: str
    why: str


@dataclass(frozen=True)
class Station:
    """A sublayer of a :class:`Stream`: its connection, its last linear layer, its norm, and who reads that norm.

    `readers` are the modules that read the stream behind `norm` within the stream, as in `Into`.
    """
    residual: str
    last: str
    norm: str
    readers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stream:
    """A residual stream whose norms stand in it, behind the sums: each of `stations` in order.

    What reads it at the end are the norms `ends`, over the stream's channels or over several copies of each in a row;
    without any, the rule says by `Emits` that the last norm is an output. `pads` are for ends in modules that pad the
    stream with zeros: pairs of a module and a function, as in `Into`.
    """
    stations: tuple[Station, ...]
    ends: tuple[str, ...] = ()
    pads: tuple[tuple[str, Pad], ...] = ()

    def within(self, prefix: str) -> Stream:
        """The same with full names, for a module with the name `prefix`."""
        if not prefix:
            return self
        stations = tuple(Station(f'{prefix}.{station.residual}', f'{prefix}.{station.last}', f'{prefix}.{station.norm}',
                                 tuple(f'{prefix}.{reader}' for reader in station.readers))
                         for station in self.stations)
        return Stream(stations, tuple(f'{prefix}.{end}' for end in self.ends),
                      tuple((f'{prefix}.{name}', pad) for name, pad in self.pads))


@dataclass(frozen=True)
class Unties:
    """`layer` may share its weight with others, which stay as they are: it gets a copy when a norm goes into it."""
    layer: str


Fact = Into | Behind | Emits | Reads | Averages | Chain | Stays | Stream | Unties
Rule = Callable[[nn.Module], Iterable[Fact]]

_RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {}
_KNOWN: set[str] = set()  # names that are known to be those of classes


def fold_rule(*classes: type[nn.Module] | str,
              methods: tuple[str, ...] = ('forward', )) -> Callable[[Rule], Rule]:
    """Registers a function as the fold rule of one or several classes of modules.

    The rule of a class serves its subclasses too, as long as they override none of `methods`; the rule of
    the nearest class wins. An instance whose `methods` have been replaced has no rule. For a block of one's
    own::

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
        for cls in classes:
            name = cls if isinstance(cls, str) else full_name(cls)
            _RULES[name] = rule, methods
            if not isinstance(cls, str):
                _KNOWN.add(name)
        return rule

    return register


def check_names() -> None:
    """Looks whether each class that a rule names exists, where its package is imported.

    Raises:
        NameError: it does not; names the rule.
    """
    for name, (rule, _) in _RULES.items():
        if name in _KNOWN or name.partition('.')[0] not in sys.modules:
            continue
        module, _, cls = name.rpartition('.')
        try:
            found = getattr(import_module(module), cls, None)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):  # something that the package needs
                continue
            found = None
        if found is None:
            raise NameError(f'the fold rule {rule.__name__} ({rule.__module__}) is for {name}, and there is no such '
                            'class')
        _KNOWN.add(name)


def facts(module: nn.Module) -> Iterator[Fact]:
    """What the rule for `module`'s class says about it; nothing where there is none."""
    for cls in type(module).__mro__:
        rule, methods = _RULES.get(full_name(cls), (None, ()))
        if rule is None:
            continue
        # A method of the instance alone hides that of its class.
        if all(getattr(type(module), method) is getattr(cls, method) and method not in vars(module)
               for method in methods):
            yield from rule(module)
        return


def full_name(cls: type) -> str:
    """Where a class is defined and its name, 'package.module.Class'."""
    return f'{cls.__module__}.{cls.__qualname__}'
