"""Filters that are to keep weights of a kind from decay, and match none of them.

What a filter is for is tried: the loop is built again and makes one step, and the filter gets another answer for just
these weights. Where they then stand in a group without decay, it is a filter for them, and it does not match.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.weight_decay_groups.claimed_class import NORMS, ClaimedClass, namesakes
from pytest_trainloop.checks.learning.weight_decay_groups.groups import Kind, kind_of, letters
from pytest_trainloop.checks.learning.weight_decay_groups.skip_lists import SkipLists, promised
from pytest_trainloop.checks.learning.weight_decay_groups.trials import Trial, kept_by_end, kept_by_segment
from pytest_trainloop.tracing.handed_names import HandedNames

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


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A filter that matches none of the weights that it is for."""

    written: str
    """What it asks: a pattern, or a class of torch's."""
    how: str
    """"asked", "renamed", "isinstance", "prefix", "promised" or "missed"."""
    place: str
    weights: tuple[str, ...]
    module: str
    """The class of their modules."""
    kind: Kind
    decay: float
    namesake: bool
    """Whether the pattern names the very class of the modules, and not another norm."""
    names: int = 0
    """How many names were asked, or how many weights the filter keeps from decay."""


def unmatched_filters(evidence: Evidence, groups: DecayGroups) -> list[Unmatched]:
    """One for each kind of weights that decay as a whole, or but for some."""
    by_name = {p.name: p for p in evidence.run().parameters}
    divides = groups.splits or bool(groups.empty)
    kinds: tuple[Kind, ...] = ("norm", "embedding", "bias")
    suspects = [kind for kind in kinds if groups.names(kind) and not groups.names(kind, decayed=False)]
    partly = [kind for kind in kinds[:2] if groups.names(kind, decayed=True) and groups.names(kind, decayed=False)]
    own = _own_and_nested(groups, by_name) if divides else []
    found: list[Unmatched] = []
    first: Trial | None = Trial(evidence) if suspects or partly or own else None
    if first is not None and (first.decays is None or not first.names.given):
        first = None  # no code of the loop's asked for names
    if first is not None:
        found += _behind_a_prefix(evidence, first, own)
        found += [] if found else _promised(evidence, first, own)
    for kind in suspects:
        weights = [by_name[name] for name in groups.names(kind)]
        one = None
        if first is not None:
            one = _first(_asked(evidence, first, weights)) or _first(_renamed(evidence, first, weights))
            one = one or _first(_ends(evidence, first, weights))
        one = one or (_first(_by_class(evidence, weights)) if kind != "bias" else None)
        if one is not None:
            found.append(one)
    if first is not None:
        for kind in partly:
            decayed = [by_name[name] for name in groups.names(kind, decayed=True)]
            found += _missed(evidence, first, groups, kind, by_name) or list(_ends(evidence, first, decayed))
    return found


def _own_and_nested(groups: DecayGroups, by_name: dict[str, Parameter]) -> list[Parameter]:
    """Weights that decay and that a module of the project's own holds itself, below another: tokens, positions."""
    kinds: tuple[Kind, ...] = ("matrix", "vector")
    decayed = [by_name[name] for kind in kinds for name in groups.names(kind, decayed=True)]
    return [p for p in decayed if not p.layer and "." in p.name and p.role == "model"]


def _behind_a_prefix(evidence: Evidence, first: Trial, own: Sequence[Parameter]) -> list[Unmatched]:
    """Weights that a list holds by their names below a module, and ``named_parameters()`` gives with that module."""
    kept = kept_by_end(evidence, first, [p.name for p in own], 0) if own else ()
    weights = [p for p in own if p.name in kept]
    written = weights[0].name.partition(".")[2] if weights else ""
    names = len(first.names.given)
    return [_unmatched(written, "prefix", "", weights, first, namesake=True, names=names)] if weights else []


def _promised(evidence: Evidence, first: Trial, own: Sequence[Parameter]) -> list[Unmatched]:
    """Weights that a module names in ``no_weight_decay()``, which the optimizer's code asks of another module."""
    names = promised(evidence) if own else {}
    weights = [p for p in own if p.name in names]
    kept = Trial(evidence, SkipLists()).kept_from_decay(p.name for p in weights) if weights else ()
    weights = [p for p in weights if p.name in kept]
    return [
        _unmatched(module, "promised", "", of_module, first, namesake=True, names=0)
        for module in dict.fromkeys(names[p.name] for p in weights)
        if (of_module := [p for p in weights if names[p.name] == module])
    ]


def _ends(evidence: Evidence, first: Trial, weights: Sequence[Parameter]) -> Iterator[Unmatched]:
    """Patterns that are looked for at the start of names only (``re.match``), or compared with whole names."""
    for segments in (2, 1):
        kept = kept_by_end(evidence, first, [p.name for p in weights if "." in p.name], segments)
        moved = [p for p in weights if p.name in kept]
        if moved:
            written = ".".join(moved[0].name.split(".")[-segments:])
            yield _unmatched(written, "prefix", "", moved, first, namesake=True, names=len(first.names.given))
            return


def _missed(
    evidence: Evidence, first: Trial, groups: DecayGroups, kind: Kind, by_name: dict[str, Parameter]
) -> list[Unmatched]:
    """Weights of a kind that decay where a filter by name keeps the others of their class from it."""
    if any("matrix" in g.members for g in groups.groups if g.decay == 0):
        return []  # divided by parts of the model
    found = []
    kept = [by_name[name] for name in groups.names(kind, decayed=False)]
    decayed = [by_name[name] for name in groups.names(kind, decayed=True)]
    for module in dict.fromkeys(p.module for p in decayed):
        missed = [p for p in decayed if p.module == module]
        segments = dict.fromkeys(_last(p.owner) for p in kept if p.module == module and _last(p.owner).isidentifier())
        for segment in list(segments)[:2]:
            moved = kept_by_segment(evidence, first, [p.name for p in missed], segment)
            if len(moved) == len(missed):
                one = _unmatched(segment, "missed", "", missed, first, namesake=True, names=len(kept))
                found.append(one)
                break
    return found


def _all_kept(trial: Trial, weights: Sequence[Parameter]) -> bool:
    return len(trial.kept_from_decay(p.name for p in weights)) == len(weights)


def _first(found: Iterator[Unmatched]) -> Unmatched | None:
    """The first that names the very class of the modules, else the first."""
    all_of_them = list(found)
    return next((f for f in all_of_them if f.namesake), all_of_them[0] if all_of_them else None)


def _asked(evidence: Evidence, first: Trial, weights: Sequence[Parameter]) -> Iterator[Unmatched]:
    """Patterns that the names of all these weights were asked for, and that no name has."""
    names = first.names
    for question in names.questions.values():
        if question.ever:
            continue
        named = _named_by(question.pattern, weights)
        if named is None:
            continue
        meant, namesake = named
        numbers = names.numbers(p.name for p in meant) & question.asked
        if {names.parameters[n] for n in numbers} != {p.name for p in meant}:
            continue
        if _all_kept(Trial(evidence, HandedNames(yes=(question.pattern, numbers))), meant):
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


def _renamed(evidence: Evidence, first: Trial, weights: Sequence[Parameter]) -> Iterator[Unmatched]:
    """Spellings with which these weights would be kept from decay: a filter by ``re`` or ``fnmatch``, or one that puts
    names together."""
    modules = " ".join(letters(p.module) for p in weights)
    of_class = [kind for kind in _TOKENS if kind in modules]
    for kind in [*of_class, *(["layernorm"] if "norm" in of_class and "layernorm" not in of_class else [])]:
        for token in _TOKENS[kind]:
            if any(token in name for name in first.names.given):
                continue
            if len(kept_by_segment(evidence, first, [p.name for p in weights], token)) == len(weights):
                exact, names = kind in of_class, len(first.names.given)
                yield _unmatched(token, "renamed", "", weights, first, namesake=exact, names=names)
                return


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
        if _all_kept(Trial(evidence, claimed), weights):
            written = f"nn.{kinds[0].__name__}" if namesake else "torch's norms"
            place = next((p for p in reversed(claimed.places) if "isinstance" in p), "")
            yield _unmatched(written, "isinstance", place, weights, None, namesake=namesake, names=0)
            return


def _unmatched(
    written: str,
    how: str,
    place: str,
    weights: Sequence[Parameter],
    first: Trial | None,
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


def _common_start(words: list[str]) -> str:
    first, last = min(words), max(words)
    same = (a == b for a, b in zip(first, last, strict=False))
    return first[: sum(itertools.takewhile(bool, same))]


def in_the_filter(found: Unmatched, record: Record) -> str:
    """What to write for all of the weights: the part that their names share and no matrix's name has, else a class."""
    owners = [name.rpartition(".")[0].rpartition(".")[2] for name in found.weights]
    part = _common_start(owners) if len(owners) > 1 else f"{owners[0]}.weight" if owners[0] else ""
    others = [p.name for p in record.parameters if p.name not in found.weights and len(p.shape) > 1]
    if len(part.rstrip("_")) > 1 and not part[0].isdigit() and not any(part in name for name in others):
        return f'"{part}" in the filter'
    return f"leave out the parameters of every {found.module}" if found.module else "the names of these modules"
