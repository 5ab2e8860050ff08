"""Filters that are to keep weights of a kind from decay, and match none of them.

What a filter is for is tried: the loop is built again and makes one step, and the filter gets another answer for just
these weights. Where they then stand in a group without decay, it is a filter for them, and it does not match.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.learning.weight_decay_groups.claimed_class import NORMS, ClaimedClass, namesakes
from pytest_trainloop.checks.learning.weight_decay_groups.groups import Kind, kind_of, letters
from pytest_trainloop.checks.learning.weight_decay_groups.handed_names import HandedNames
from pytest_trainloop.errors import CannotDecide, TrainLoopError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

_NAMES_OF = {
    "layernorm": ("layernorm", "ln", "lnorm"),
    "batchnorm": ("batchnorm", "bn", "bnorm"),
    "groupnorm": ("groupnorm", "gn"),
    "rmsnorm": ("rmsnorm", "rms"),
    "norm": ("norm", "norms"),
    "embedding": ("embedding", "embeddings", "embed", "embeds", "emb"),
}
"""What is written in filters, in letters, for modules whose class has this in its name."""

_TOKENS: dict[str, tuple[str, ...]] = {
    "layernorm": ("LayerNorm", "layernorm", "layer_norm", "ln"),
    "batchnorm": ("bn", "batchnorm", "batch_norm", "BatchNorm"),
    "groupnorm": ("GroupNorm", "gn", "group_norm"),
    "rmsnorm": ("rmsnorm", "RMSNorm"),
    "norm": ("norm", "Norm"),
    "embedding": ("embedding", "embed", "Embedding"),
}
"""Spellings of a segment that is put into names, where it cannot be seen what a filter asks."""

_NO_KIND = "part"
"""A segment that names no kind of layer."""


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A filter that matches none of the weights that it is for."""

    written: str
    """What it asks: a pattern, or a class of torch's."""
    how: str
    """"asked", "renamed" or "isinstance"."""
    place: str
    weights: tuple[str, ...]
    module: str
    """The class of their modules."""
    kind: Kind
    decay: float
    namesake: bool
    """Whether the pattern names the very class of the modules, and not another norm."""
    names: int = 0
    """How many names were asked."""


def unmatched_filters(evidence: Evidence, groups: DecayGroups) -> list[Unmatched]:
    """One for each kind of weights that decay as a whole, in loops that keep others from it."""
    record = evidence.run()
    found: list[Unmatched] = []
    by_name = {p.name: p for p in record.parameters}
    kinds: tuple[Kind, ...] = ("norm", "embedding")
    suspects = [kind for kind in kinds if groups.names(kind) and not groups.names(kind, decayed=False)]
    if not groups.splits or not suspects:
        return []
    first = _Trial(evidence)
    if first.decays is None:
        return []
    for kind in suspects:
        weights = [by_name[name] for name in groups.names(kind)]
        one = _first(_asked(evidence, first, weights)) or _first(_renamed(evidence, first, weights))
        one = one or _first(_by_class(evidence, weights))
        if one is not None:
            found.append(one)
    return found


def _first(found: Iterator[Unmatched]) -> Unmatched | None:
    """The first that names the very class of the modules, else the first."""
    all_of_them = list(found)
    return next((f for f in all_of_them if f.namesake), all_of_them[0] if all_of_them else None)


class _Trial:
    """One step of a fresh loop, and the decay of each parameter in it; None where the loop does not take it."""

    def __init__(self, evidence: Evidence, given: HandedNames | ClaimedClass | None = None) -> None:
        given = HandedNames() if given is None else given
        more: dict[str, Any] = {"contexts": given.contexts} if isinstance(given, HandedNames) else {}
        self.names = given if isinstance(given, HandedNames) else HandedNames()
        self.decays: dict[str, float] | None = None
        try:
            record = evidence.rerun(around=given.watching, enough=lambda r: r.rounds >= 1, may_raise=True, **more)
        except (TrainLoopError, CannotDecide):
            return
        if record.raised is None:
            self.decays = _decays(record)

    def without_decay(self, weights: Sequence[Parameter]) -> bool:
        return self.decays is not None and all(self.decays.get(p.name, 1.0) == 0 for p in weights)


def _decays(record: Record) -> dict[str, float]:
    return {
        record.name(index): optimizer.weight_decays[group]
        for optimizer in record.optimizers
        for index, group in zip(optimizer.parameters, optimizer.groups, strict=True)
    }


def _asked(evidence: Evidence, first: _Trial, weights: Sequence[Parameter]) -> Iterator[Unmatched]:
    """Patterns that the names of all these weights were asked for, and that no name has."""
    names = first.names
    for question in names.questions.values():
        if question.ever:
            continue
        named = _named_by(question.pattern, weights)
        if named is None:
            continue
        meant, namesake = named
        numbers = frozenset(n for n in question.asked if names.parameters[n] in {p.name for p in meant})
        if {names.parameters[n] for n in numbers} != {p.name for p in meant}:
            continue
        if _Trial(evidence, HandedNames(yes=(question.pattern, numbers))).without_decay(meant):
            yield _unmatched(
                question.pattern, "asked", question.place, meant, first, namesake=namesake, names=len(question.asked)
            )
            if namesake:
                return


def _named_by(pattern: str, weights: Sequence[Parameter]) -> tuple[Sequence[Parameter], bool] | None:
    """The weights that a pattern names by their class or by the name of their module, and whether it does so exactly;
    all norms for another norm's name. None for a pattern that names neither."""
    asked = letters(re.sub(r"weight|bias", "", pattern.lower()))
    if not asked:
        return None
    exact = [p for p in weights if _names_class(asked, p) or (len(asked) > 3 and asked in letters(_last(p.owner)))]
    if exact:
        return exact, True
    other_norm = any(asked in spelt for kind, spelt in _NAMES_OF.items() if kind != "embedding")
    return (weights, False) if other_norm and kind_of(weights[0]) == "norm" else None


def _names_class(asked: str, p: Parameter) -> bool:
    return any(kind in letters(p.module) and asked in spelt for kind, spelt in _NAMES_OF.items())


def _last(owner: str) -> str:
    return owner.rpartition(".")[2]


def _renamed(evidence: Evidence, first: _Trial, weights: Sequence[Parameter]) -> Iterator[Unmatched]:
    """Spellings with which these weights would be kept from decay: a filter by ``re`` or ``fnmatch``, or one that puts
    names together."""
    names = first.names
    numbers = [n for n, name in enumerate(names.parameters) if name in {p.name for p in weights}]
    if not numbers:
        return

    def trial_of(token: str) -> _Trial:
        return _Trial(evidence, HandedNames(renamed={n: _with_segment(names.given[n], token) for n in numbers}))

    modules = " ".join(letters(p.module) for p in weights)
    of_class = [kind for kind in _TOKENS if kind in modules]
    for kind in [*of_class, *(["layernorm"] if "norm" in of_class and "layernorm" not in of_class else [])]:
        for token in _TOKENS[kind]:
            if any(token in name for name in names.given):
                continue
            if trial_of(token).without_decay(weights):
                if trial_of(_NO_KIND).without_decay(weights):
                    return  # a list of whole names: any other one is not in it
                exact = kind in of_class
                yield _unmatched(token, "renamed", "", weights, first, namesake=exact, names=len(names.given))
                return


def _with_segment(name: str, token: str) -> str:
    path, _, leaf = name.rpartition(".")
    return ".".join(filter(None, (path, token, leaf)))


def _by_class(evidence: Evidence, weights: Sequence[Parameter]) -> Iterator[Unmatched]:
    """Classes of torch's own that these modules, which are the project's, would have to be of."""
    if any(p.layer for p in weights) or not all(p.module for p in weights):
        return
    modules = frozenset(p.module for p in weights)
    same = tuple(dict.fromkeys(kind for module in sorted(modules) for kind in namesakes(module)))
    others = () if kind_of(weights[0]) == "embedding" else NORMS
    for kinds, namesake in ((same, True), (others, False)):
        if not kinds:
            continue
        claimed = ClaimedClass(modules, kinds)
        trial = _Trial(evidence, claimed)
        if trial.without_decay(weights):
            written = f"nn.{kinds[0].__name__}" if namesake else "torch's norms"
            place = next((p for p in reversed(claimed.places) if "isinstance" in p), "")
            yield _unmatched(written, "isinstance", place, weights, None, namesake=namesake, names=0)
            return


def _unmatched(
    written: str,
    how: str,
    place: str,
    weights: Sequence[Parameter],
    first: _Trial | None,
    *,
    namesake: bool,
    names: int,
) -> Unmatched:
    decays = (first.decays if first is not None else None) or {}
    return Unmatched(
        written=written,
        how=how,
        place=place,
        weights=tuple(p.name for p in weights),
        module=next((p.module for p in weights if p.module), ""),
        kind=kind_of(weights[0]),
        decay=max((decays.get(p.name, 0.0) for p in weights), default=0.0),
        namesake=namesake,
        names=names,
    )
