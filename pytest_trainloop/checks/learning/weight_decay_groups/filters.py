"""Filters that are to keep weights of a kind from decay, and match none of them.

What a filter is for is tried: the loop is built again and makes one step, and the filter gets another answer for just
these weights. Where they then are in a group without decay, it is a filter for them, and it does not match.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.learning.weight_decay_groups.answers import (
    NORMS,
    ClaimedClass,
    SkipLists,
    namesakes,
    promised,
)
from pytest_trainloop.checks.learning.weight_decay_groups.causes import found
from pytest_trainloop.checks.learning.weight_decay_groups.groups import PLURAL, kind_of, letters
from pytest_trainloop.core.wording import count
from pytest_trainloop.instruments.tracing.asked_names import AskedNames, one_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups, Kind
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Parameter
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


class Trial:
    """One step of a fresh loop in which the code that divides its weights gets other answers: the decay of each
    parameter; None where the loop does not take the answers."""

    def __init__(self, evidence: Evidence, given: AskedNames | ClaimedClass | SkipLists | None = None) -> None:
        self.names = given if isinstance(given, AskedNames) else AskedNames()
        if given is None:
            self.names = evidence.shared(AskedNames.of)
            record = self.names.record
        else:
            record = self.names.run(evidence) if given is self.names else one_step(evidence, given.watching)
        self.decays: dict[str, float] | None = None
        if record is not None:
            self.decays = {
                record.name(index): optimizer.weight_decays[group]
                for optimizer in record.optimizers
                for index, group in zip(optimizer.parameters, optimizer.groups, strict=True)
            }

    def kept_from_decay(self, weights: Iterable[str]) -> tuple[str, ...]:
        """Those of these weights that are in groups without decay."""
        decays = self.decays
        return () if decays is None else tuple(name for name in weights if decays.get(name, 1.0) == 0)


def unmatched_filters(evidence: Evidence, groups: DecayGroups) -> list[Finding]:
    """One for each kind of weights that decay as a whole, or but for some."""
    by_name = {p.name: p for p in evidence.run().parameters}
    divides = groups.splits or bool(groups.empty)
    kinds: tuple[Kind, ...] = ("norm", "embedding", "bias")
    suspects = [kind for kind in kinds if groups.names(kind) and not groups.names(kind, decayed=False)]
    partly = [kind for kind in kinds[:2] if groups.names(kind, decayed=True) and groups.names(kind, decayed=False)]
    own = _own_and_nested(groups, by_name) if divides else []
    named: list[Finding] = []
    first: Trial | None = Trial(evidence) if suspects or partly or own else None
    if first is not None and (first.decays is None or not first.names.given):
        first = None  # no code of the loop's asked for names
    if first is not None:
        named += _behind_a_prefix(evidence, first, own)
        named += [] if named else _promised(evidence, first, own)
    for kind in suspects:
        weights = [by_name[name] for name in groups.names(kind)]
        one = None
        if first is not None:
            one = _first(_asked(evidence, first, weights)) or _first(_renamed(evidence, first, weights))
            one = one or _first(_ends(evidence, first, weights))
        one = one or (_first(_by_class(evidence, weights)) if kind != "bias" else None)
        if one is not None:
            named.append(one)
    if first is not None:
        for kind in partly:
            decayed = [by_name[name] for name in groups.names(kind, decayed=True)]
            named += _missed(evidence, first, groups, kind, by_name) or list(_ends(evidence, first, decayed))
    return named


def _own_and_nested(groups: DecayGroups, by_name: dict[str, Parameter]) -> list[Parameter]:
    """Weights that decay and that a module of the project's own holds itself, below another: tokens, positions."""
    kinds: tuple[Kind, ...] = ("matrix", "vector")
    decayed = [by_name[name] for kind in kinds for name in groups.names(kind, decayed=True)]
    return [p for p in decayed if not p.layer and "." in p.name and p.role == "model"]


def _behind_a_prefix(evidence: Evidence, first: Trial, own: Sequence[Parameter]) -> Iterator[Finding]:
    """Weights that a list holds by their names below a module, and ``named_parameters()`` gives with that module."""
    kept = _kept_by_end(evidence, first, [p.name for p in own], 0) if own else ()
    weights = [p for p in own if p.name in kept]
    if weights:
        yield _unmatched(evidence, "prefix", weights[0].name.partition(".")[2], weights, first)


def _promised(evidence: Evidence, first: Trial, own: Sequence[Parameter]) -> Iterator[Finding]:
    """Weights that a module names in ``no_weight_decay()``, which the optimizer's code asks of another module."""
    names = promised(evidence) if own else {}
    weights = [p for p in own if p.name in names]
    kept = Trial(evidence, SkipLists()).kept_from_decay(p.name for p in weights) if weights else ()
    weights = [p for p in weights if p.name in kept]
    for module in dict.fromkeys(names[p.name] for p in weights):
        yield _unmatched(evidence, "promised", module, [p for p in weights if names[p.name] == module], first)


def _ends(evidence: Evidence, first: Trial, weights: Sequence[Parameter]) -> Iterator[Finding]:
    """Patterns that are looked for at the start of names only (``re.match``), or compared with whole names."""
    for segments in (2, 1):
        kept = _kept_by_end(evidence, first, [p.name for p in weights if "." in p.name], segments)
        moved = [p for p in weights if p.name in kept]
        if moved:
            yield _unmatched(evidence, "prefix", ".".join(moved[0].name.split(".")[-segments:]), moved, first)
            return


def _missed(
    evidence: Evidence, first: Trial, groups: DecayGroups, kind: Kind, by_name: dict[str, Parameter]
) -> list[Finding]:
    """Weights of a kind that decay where a filter by name keeps the others of their class from it."""
    if any("matrix" in g.members for g in groups.groups if g.decay == 0):
        return []  # divided by parts of the model
    named = []
    kept = [by_name[name] for name in groups.names(kind, decayed=False)]
    decayed = [by_name[name] for name in groups.names(kind, decayed=True)]
    for module in dict.fromkeys(p.module for p in decayed):
        missed = [p for p in decayed if p.module == module]
        segments = dict.fromkeys(_last(p.owner) for p in kept if p.module == module and _last(p.owner).isidentifier())
        for segment in list(segments)[:2]:
            if len(_kept_by_segment(evidence, first, [p.name for p in missed], segment)) == len(missed):
                named.append(_unmatched(evidence, "missed", segment, missed, first, kept=len(kept)))
                break
    return named


def _all_kept(trial: Trial, weights: Sequence[Parameter]) -> bool:
    return len(trial.kept_from_decay(p.name for p in weights)) == len(weights)


def _first(named: Iterator[Finding]) -> Finding | None:
    """The first that names the very class of the modules, else the first."""
    every = list(named)
    return next((f for f in every if f.level == "fault"), every[0] if every else None)


def _asked(evidence: Evidence, first: Trial, weights: Sequence[Parameter]) -> Iterator[Finding]:
    """Patterns that the names of all these weights were asked for, and that no name has."""
    names = first.names
    for question in names.questions.values():
        if question.ever:
            continue
        by_pattern = _named_by(question.pattern, weights)
        if by_pattern is None:
            continue
        wanted, namesake = by_pattern
        numbers = names.numbers(p.name for p in wanted) & question.asked
        if {names.parameters[n] for n in numbers} != {p.name for p in wanted}:
            continue
        if _all_kept(Trial(evidence, AskedNames(yes=(question.pattern, numbers))), wanted):
            facts: dict[str, Any] = {"place": question.place, "namesake": namesake, "asked": len(question.asked)}
            yield _unmatched(evidence, "asked", question.pattern, wanted, first, **facts)
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


def _renamed(evidence: Evidence, first: Trial, weights: Sequence[Parameter]) -> Iterator[Finding]:
    """Spellings with which these weights would be kept from decay: a filter by ``re`` or ``fnmatch``, or one that puts
    names together."""
    modules = " ".join(letters(p.module) for p in weights)
    of_class = [kind for kind in _TOKENS if kind in modules]
    for kind in [*of_class, *(["layernorm"] if "norm" in of_class and "layernorm" not in of_class else [])]:
        for token in _TOKENS[kind]:
            if any(token in name for name in first.names.given):
                continue
            if len(_kept_by_segment(evidence, first, [p.name for p in weights], token)) == len(weights):
                yield _unmatched(evidence, "renamed", token, weights, first, namesake=kind in of_class)
                return


def _by_class(evidence: Evidence, weights: Sequence[Parameter]) -> Iterator[Finding]:
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
            yield _unmatched(evidence, "isinstance", written, weights, place=place, namesake=namesake)
            return


def _unmatched(
    evidence: Evidence,
    how: str,
    written: str,
    weights: Sequence[Parameter],
    first: Trial | None = None,
    *,
    place: str = "",
    namesake: bool = True,
    asked: int = 0,
    kept: int = 0,
) -> Finding:
    """A filter that asks what is ``written`` and matches none of the weights that it is for. ``namesake``: it names the
    very class of the modules, and not another norm."""
    names, kind = tuple(p.name for p in weights), kind_of(weights[0])
    module = next((p.module for p in weights if p.module), "")
    decays = (first.decays if first is not None else None) or {}
    decay = max((decays.get(name, 0.0) for name in names), default=0.0)
    what, at = PLURAL[kind][len(names) > 1], f" at {decay:g}" if decay else ""
    facts: dict[str, Any] = {"pattern": repr(written), "written": written, "module": module, "given": repr(names[0])}
    facts |= {"asked": asked or (len(first.names.given) if first is not None else 0), "decay": decay}
    facts |= {"all": (f"all {len(names)} {what} decay" if len(names) > 1 else f"the one {what} decays") + at}
    facts["kept"] = count(kept, PLURAL[kind][0].partition(" ")[0])
    edit = f"add {module} to the classes" if how == "isinstance" else _in_the_filter(evidence, names, module)
    if how == "prefix":
        edit = "re.search in place of re.match; name.endswith(...); or the list with the prefix"
    elif how == "promised":
        edit = "pass it on: no_weight_decay() of the outer module, with the prefix"
    facts |= {"repair": f"{edit}; or divide by dimension: no decay where p.dim() < 2"}
    facts["level"] = "fault" if namesake else "advice"
    if how == "missed":
        return found("filter_misses_some", place, names, **facts)
    return found("filter_matches_nothing", place, names, how, **facts)


def _common_start(words: list[str]) -> str:
    first, last = min(words), max(words)
    same = (a == b for a, b in zip(first, last, strict=False))
    return first[: sum(itertools.takewhile(bool, same))]


def _in_the_filter(evidence: Evidence, names: tuple[str, ...], module: str) -> str:
    """What to write for all of the weights: the part that their names share and no matrix's name has, else a class."""
    owners = [name.rpartition(".")[0].rpartition(".")[2] for name in names]
    part = _common_start(owners) if len(owners) > 1 else f"{owners[0]}.weight" if owners[0] else ""
    others = [p.name for p in evidence.run().parameters if p.name not in names and len(p.shape) > 1]
    if len(part.rstrip("_")) > 1 and not part[0].isdigit() and not any(part in name for name in others):
        return f'"{part}" in the filter'
    return f"leave out the parameters of every {module}" if module else "the names of these modules"


def _with_names(evidence: Evidence, first: Trial, weights: Iterable[str], how: Callable[[str], str]) -> tuple[str, ...]:
    """Those of these weights that do not decay once ``named_parameters()`` gives them other names."""
    weights = tuple(weights)
    names = {number: how(first.names.given[number]) for number in sorted(first.names.numbers(weights))}
    return Trial(evidence, AskedNames(renamed=names)).kept_from_decay(weights) if names else ()


def _with_segment(segment: str) -> Callable[[str], str]:
    """Puts a segment in front of the last: "ln_1.weight" becomes "ln_1.LayerNorm.weight"."""

    def named(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        return ".".join(filter(None, (path, segment, leaf)))

    return named


def _kept_by_segment(evidence: Evidence, first: Trial, weights: Iterable[str], segment: str) -> tuple[str, ...]:
    """Those of these weights that a group without decay holds if their names have this segment, and does not if they
    have any other: whole names that are listed for decay are found under no other."""
    weights = tuple(weights)
    kept = _with_names(evidence, first, weights, _with_segment(segment))
    if not kept:
        return ()
    listed = _with_names(evidence, first, weights, _with_segment(_NO_KIND))
    return tuple(name for name in kept if name not in listed)


def _kept_by_end(evidence: Evidence, first: Trial, weights: Iterable[str], segments: int) -> tuple[str, ...]:
    """Those of these weights that a group without decay holds if their names are the last segments alone, and does not
    if another one precedes these; without their first segment where ``segments`` is 0."""
    weights = tuple(weights)

    def end(name: str) -> str:
        parts = name.split(".")
        return ".".join((parts[-segments:] if segments else parts[1:]) or parts)

    kept = _with_names(evidence, first, weights, end)
    if not kept:
        return ()
    listed = _with_names(evidence, first, weights, lambda name: f"{_NO_KIND}.{end(name)}")
    return tuple(name for name in kept if name not in listed)
