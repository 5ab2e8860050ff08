"""Patterns that a loop's code asks names of parameters for, and that no name has: what they are for, by experiment.

A pattern is true of no name in many right loops: lists of spellings, of parts of several models, of what is optional.
Two kinds are looked at: one that a name all but has, and one in whose function no pattern is true of any name. What the
pattern is for is tried: the loop is built again and makes one step, and the pattern gets the answer "yes".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.tracing.asked_names import AskedNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.instruments.tracing.asked_names import Question
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

MOST_TRIED = 6
"""Patterns of one loop that are tried: each is a run of one step."""

LEAST_LETTERS = 4
"""Of a word that is looked for inside others."""

_WRAPPERS = ("module", "origmod", "model", "basemodel")
"""Segments that wrapping a model puts before its names, or unwrapping takes away."""

_LEAVES = ("weight", "bias")


@dataclass(slots=True)
class UnmatchedNames:
    """The patterns of one line that match nothing and have an effect."""

    place: str
    asked: int
    """The number of names that were asked."""
    patterns: list[str] = field(default_factory=list)
    starts: dict[str, None] = field(default_factory=dict)
    """The first segments of the names that were asked."""
    nearly: dict[str, str] = field(default_factory=dict)
    """The parameters that they all but name, and what to write for each; empty where nothing is near."""

    @property
    def repair(self) -> str:
        texts = [repr(text) for text in dict.fromkeys(self.nearly.values())]
        if texts and set(texts) <= set(self.patterns):
            return f"name.startswith({texts[0]}): no name is just that, and {next(iter(self.nearly))} begins with it"
        return f"write {some(texts)}, as this model's names have it" if texts else ""


def unmatched_names(
    evidence: Evidence, among: Sequence[str], has_effect: Callable[[Record, Sequence[str]], bool]
) -> list[UnmatchedNames]:
    """Of the patterns that no name has, those that are for some of these parameters: ``has_effect`` is asked of the run
    in which they get the answer "yes" for the parameters that are given to it."""
    names, wanted = evidence.shared(AskedNames.of), frozenset(among)
    record, tried = names.record, 0
    found: dict[tuple[str, bool], UnmatchedNames] = {}
    if record is None:
        return []
    for question in (*names.questions.values(), *names.of_modules.values()):
        targets_of = {n: [name for name in names.below[n] if name in wanted] for n in question.asked}
        asked = {name for number in question.asked for name in names.below[number]}
        # others are passed over before they are asked (odd: frozen_names_are_passed_over)
        unasked = any(question.pattern in p.name for p in record.parameters if p.name not in asked)
        if question.ever or unasked or not question.pattern or tried == MOST_TRIED:
            continue
        near = {n: text for n, targets in targets_of.items() if targets and (text := _written(question, names, n))}
        # a list of spellings, an if for each part of the model: some match (odd: parts_of_several_models_are_listed)
        if not near and (question.within in names.matched or not wanted or not wanted <= asked):
            continue
        tried += 1
        few = min((targets for targets in targets_of.values() if targets), key=len)
        numbers = frozenset(near or (n for n, targets in targets_of.items() if targets == few))
        targets = tuple(dict.fromkeys(name for number in sorted(numbers) for name in targets_of[number]))
        answered = AskedNames(yes=(question.pattern, numbers)).run(evidence)
        if answered is not None and has_effect(answered, targets):
            one = found.setdefault((question.place, bool(near)), UnmatchedNames(question.place, len(question.asked)))
            one.patterns.append(repr(question.pattern))
            one.starts.update(dict.fromkeys(names.given[n].partition(".")[0] for n in sorted(question.asked)))
            one.nearly.update({name: text for number, text in near.items() for name in targets_of[number]})
    return list(found.values())


def _written(question: Question, names: AskedNames, number: int) -> str:
    """What to write for a pattern so that it is true of this name; empty where more than a little differs."""
    given, known = names.given[number], names.parameters[number]
    before = known.removesuffix(given)
    rest = question.pattern.removeprefix(before)
    # the names of a part of the model begin at that part
    if known.endswith(given) and rest not in ("", question.pattern) and given.startswith(rest):
        return rest
    return nearly(question, given)


def nearly(question: Question, name: str) -> str:
    """What to write for a pattern so that it is true of a name: where only its prefix differs, or its
    spelling, or one segment of a path. Empty where more does."""
    wanted = [_plain(part) for part in question.pattern.split(".") if part]
    parts = name.split(".")
    for path in _paths(wanted):
        if all(word in _LEAVES or word.isdigit() for word in path) or len("".join(path)) < LEAST_LETTERS - 1:
            continue
        at = _position(path, [_plain(part) for part in parts], inside=question.how == "in")
        if at is not None:
            first, end = 0 if question.how in ("start", "is") else at, at + len(path)
            return ".".join(parts[first:end]) + "." * (question.pattern.endswith(".") and end < len(parts))
    return ""


def _paths(wanted: list[str]) -> Iterator[list[str]]:
    """The segments of a pattern; without a wrapper before them; and without one between two others. A number says
    which layer, the first segment which part, and the last segment what."""
    yield wanted
    if len(wanted) > 1 and wanted[0] in _WRAPPERS:
        yield wanted[1:]
    for at in range(1, len(wanted) - 1):
        if not wanted[at].isdigit():
            yield [*wanted[:at], *wanted[at + 1 :]]


def _position(path: list[str], parts: list[str], *, inside: bool) -> int | None:
    """Where these segments follow each other in a name; ``inside``: a long word may be part of a segment."""

    def same(word: str, part: str) -> bool:
        return word == part or (inside and len(path) == 1 and len(word) >= LEAST_LETTERS and word in part)

    starts = range(len(parts) - len(path) + 1)
    return next((at for at in starts if all(map(same, path, parts[at:]))), None)


def _plain(part: str) -> str:
    return re.sub("[^a-z0-9]", "", part.lower())
