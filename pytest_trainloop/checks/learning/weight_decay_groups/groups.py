"""Which weights each group of an optimizer decays, by what they are."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

Kind = Literal["norm", "bias", "embedding", "vector", "matrix"]
"""A gain of a norm; a bias, or the shift of a norm; the table of an embedding; another tensor of one dimension or none;
all others."""


PLURAL: dict[Kind, tuple[str, str]] = {
    "norm": ("gain of a norm", "gains of norms"),
    "bias": ("bias", "biases"),
    "embedding": ("table of an embedding", "tables of embeddings"),
    "vector": ("other vector", "other vectors"),
    "matrix": ("matrix", "matrices"),
}


def letters(text: str) -> str:
    """The letters of a name in lower case: "ln_1" and "LN" are both "ln"."""
    return re.sub("[^a-z]", "", text.lower())


def kind_of(p: Parameter) -> Kind:
    module, leaf = letters(p.module), p.name.rpartition(".")[2]
    in_norm = "norm" in module and (p.layer or sum(size > 1 for size in p.shape) <= 1)
    if len(p.shape) <= 1 or in_norm:
        shifts = "bias" in leaf.lower() or (in_norm and leaf.lower() in ("beta", "shift", "b"))
        return "bias" if shifts else "norm" if in_norm else "vector"
    return "embedding" if "embedding" in module and len(p.shape) == 2 else "matrix"


@dataclass(frozen=True, slots=True)
class Group:
    """One group of an optimizer, with those of its weights that a gradient reached."""

    optimizer: int
    number: int
    decay: float
    lr: float
    """Its learning rate at the first step."""
    momentum: float = 0.0
    into_gradient: bool = False
    """Whether Adam, or a variant of it, adds the decay to the gradient."""
    default: bool = False
    """Whether the decay is what AdamW takes where none is given."""
    members: dict[Kind, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.members.values() for name in names)

    @property
    def contents(self) -> str:
        """How many weights of each kind it has."""
        return listed([f"{len(names)} {PLURAL[kind][len(names) > 1]}" for kind, names in self.members.items()])


@dataclass(frozen=True, slots=True)
class DecayGroups:
    """The groups of all optimizers that step."""

    groups: tuple[Group, ...]
    kinds: dict[int, str]
    """The class of each optimizer by its index."""
    partly_frozen: bool
    """Whether some weights of the model do not train."""
    empty: tuple[tuple[int, int], ...] = ()
    """Groups without decay that hold nothing, by optimizer and number."""
    spared: Mapping[int, tuple[frozenset[int], str]] = field(default_factory=dict)

    @classmethod
    def of(cls, evidence: Evidence) -> DecayGroups:
        from pytest_trainloop.checks.learning.weight_decay_groups.spared import spared

        record = evidence.run()
        return cls.in_record(record, spared(evidence, record))

    @classmethod
    def in_record(cls, record: Record, spared: Mapping[int, tuple[frozenset[int], str]] | None = None) -> DecayGroups:
        """``spared``: by optimizer, the parameters that it leaves out of the decay of their group, and a line of its
        step (spared.py). They are a group without decay here."""
        by_optimizer = {step.optimizer: step.lrs for step in reversed(record.innermost_steps())}
        groups, empty = [], []
        for optimizer in record.optimizers:
            lrs = by_optimizer.get(optimizer.index, ())
            options = zip(lrs, optimizer.weight_decays, optimizer.momenta, optimizer.decoupled, strict=False)
            for number, (lr, decay, momentum, decoupled) in enumerate(options):
                held = [i for i, g in zip(optimizer.parameters, optimizer.groups, strict=True) if g == number]
                if not held and decay == 0:
                    empty.append((optimizer.index, number))
                trained = [record.parameters[i] for i in dict.fromkeys(held) if record.reached(i)]
                group = Group(
                    optimizer.index,
                    number,
                    decay,
                    lr,
                    momentum,
                    into_gradient=optimizer.from_torch and optimizer.kind in _ADAMS and not decoupled,
                    default=optimizer.from_torch and (optimizer.kind, decay) == ("AdamW", ADAMW_DEFAULT),
                    members=_by_kind(trained),
                )
                left_out, _line = (spared or {}).get(optimizer.index, (frozenset(), ""))
                if without := [p for p in trained if p.index in left_out]:
                    decayed = [p for p in trained if p.index not in left_out]
                    groups.append(replace(group, decay=0.0, members=_by_kind(without)))
                    group = replace(group, members=_by_kind(decayed))
                groups.append(group)
        frozen = any(p.role == "model" and not p.trainable for p in record.parameters)
        used = tuple(g for g in groups if g.members)
        return cls(used, {o.index: o.kind for o in record.optimizers}, frozen, tuple(empty), spared or {})

    def count(self, kind: Kind, *, decayed: bool | None = None) -> int:
        return len(self.names(kind, decayed=decayed))

    def names(self, kind: Kind, *, decayed: bool | None = None) -> tuple[str, ...]:
        """The weights of a kind, or those of them that do, or do not, decay."""
        return tuple(
            name for g in self.groups if decayed is None or decayed == (g.decay > 0) for name in g.members.get(kind, ())
        )

    @property
    def splits(self) -> bool:
        """Whether an optimizer decays some of its groups and not others."""
        return any({g.decay > 0 for g in self.groups if g.optimizer == index} == {True, False} for index in self.kinds)

    @property
    def swapped(self) -> tuple[Group, Group] | None:
        """A group of norms and biases only that decays and one of matrices only that does not, in an optimizer whose
        groups are all one or the other."""
        for index in self.kinds:
            mine = [g for g in self.groups if g.optimizer == index]
            on = [g for g in mine if g.decay > 0]
            off = [g for g in mine if g.decay == 0]
            flat = on and all(g.members.keys() <= FLAT for g in on)
            deep = off and not any(g.members.keys() & FLAT for g in off)
            kinds = {kind for g in on for kind in g.members}
            trained = not self.partly_frozen and any("matrix" in g.members for g in off)
            if flat and deep and trained and "bias" in kinds:
                return on[0], off[0]
        return None

    @property
    def divided(self) -> tuple[Group, Group] | None:
        """A group of matrices only and one of norms and biases only at one learning rate, in an optimizer whose groups
        are all one or the other and all decay, or none of which does."""
        for index in self.kinds:
            mine = [g for g in self.groups if g.optimizer == index]
            flat = [g for g in mine if g.members.keys() <= FLAT]
            deep = [g for g in mine if not g.members.keys() & FLAT]
            uniform = len({g.decay > 0 for g in mine}) == 1 and len({g.lr for g in mine}) == 1
            common = any(g.members.keys() & {"norm", "bias"} for g in flat)
            grouped = any(len(g.names) > 1 for g in mine)  # groups of one weight each give all of them their options
            if deep and common and uniform and grouped and len(flat) + len(deep) == len(mine):
                return deep[0], next(g for g in flat if g.members.keys() & {"norm", "bias"})
        return None


ADAMW_DEFAULT = 0.01
"""The weight decay of torch's AdamW where none is given."""

FLAT: frozenset[Kind] = frozenset({"norm", "bias", "vector"})

_ADAMS = {"Adam", "NAdam", "RAdam", "Adamax"}


def _by_kind(parameters: Iterable[Parameter]) -> dict[Kind, tuple[str, ...]]:
    found: dict[Kind, list[str]] = {}
    for p in parameters:
        found.setdefault(kind_of(p), []).append(p.name)
    return {kind: tuple(names) for kind, names in found.items()}


def listed(parts: list[str]) -> str:
    return " and ".join(", ".join(parts).rsplit(", ", 1))
