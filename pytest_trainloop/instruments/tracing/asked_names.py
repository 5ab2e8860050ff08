"""Names of parameters and modules that note what a filter asks of them, or that answer it otherwise.

While a loop is built and makes its first step, ``named_parameters()``, ``named_modules()`` and ``named_children()``
hand its code strings of a class that equals and hashes as ``str``, and that a pickle, a copy or JSON turns into
``str``. No other run hands them out.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop.core.errors import CannotDecide, TrainLoopError
from pytest_trainloop.core.ours import StandsIn
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here, layer, user_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(slots=True)
class Question:
    """One pattern that names were asked for: ``pattern in name``, ``name.startswith(pattern)`` and so on."""

    pattern: str
    place: str
    within: object = None
    """The function of the project's that asked first."""
    how: str = "in"
    """"in", "start", "end", or "is" for the whole name."""
    asked: set[int] = field(default_factory=set)
    """The numbers of the names."""
    ever: bool = False
    """Whether it was true of any."""


class AskedNames:
    """For one run. Names are numbered in the order in which they are given out, the same in each run of a seed.

    ``yes`` answers "yes" where names of these numbers are asked for a pattern. ``renamed`` hands out another name for
    these numbers.
    """

    def __init__(self, yes: tuple[str, frozenset[int]] | None = None, renamed: Mapping[int, str] | None = None) -> None:
        self._yes, self._renamed = yes, dict(renamed or {})
        self._things: list[torch.Tensor | nn.Module] = []
        self._modules: set[int] = set()
        self.given: list[str] = []
        """The names as the modules have them, by their numbers."""
        self.questions: dict[str, Question] = {}
        """By pattern, those about parameters."""
        self.of_modules: dict[str, Question] = {}
        """Those about modules."""
        self.parameters: list[str] = []
        """The parameter behind each number, as the record names it; empty for a module."""
        self.below: list[tuple[str, ...]] = []
        """That parameter, or all parameters of the module and of those below it."""
        self.matched: set[object] = set()
        """The functions of the project's in which some pattern was true of some name."""
        self.record: Record | None = None
        """What ``run`` gave."""

    @classmethod
    def of(cls, evidence: Evidence) -> AskedNames:
        """Those of a run of one step, with every question answered as it is."""
        found = cls()
        found.run(evidence)
        return found

    def run(self, evidence: Evidence) -> Record | None:
        """The record of a run of one step; None where the loop does not take the answers."""
        self.record = one_step(evidence, self.watching, contexts=self.contexts)
        return self.record

    def never_true(self) -> str:
        """The only line that asks names for a pattern which no name has."""
        questions = (*self.questions.values(), *self.of_modules.values())
        places = {question.place for question in questions if question.pattern and not question.ever}
        return places.pop() if len(places) == 1 else ""

    def numbers(self, parameters: Iterable[str]) -> frozenset[int]:
        """The numbers of the names under which these parameters were given out."""
        wanted = set(parameters)
        return frozenset(number for number, name in enumerate(self.parameters) if name in wanted)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around building and ``fit``."""
        with Patches() as patches:
            for name in ("named_parameters", "named_modules", "named_children"):
                patches.put(nn.Module, name, self._wrapped)
            yield

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._naming(watch),)

    @contextlib.contextmanager
    def _naming(self, watch: Watch) -> Iterator[None]:
        try:
            yield
        finally:
            names = [entry.name for entry in watch.table.entries]
            below: dict[str | None, list[str]] = {}
            for name in names:
                path = name
                while path:
                    path = path.rpartition(".")[0]
                    below.setdefault(path, []).append(name)
            for thing in self._things:
                index = None if isinstance(thing, nn.Module) else watch.table.index(thing)
                self.parameters.append("" if index is None else names[index])
                held = below.get(watch.table.modules.get(id(thing)), ()) if index is None else (names[index],)
                self.below.append(tuple(held))
            self._things.clear()

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def named(module: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(module, *args, **kwargs)
            return made if layer(sys._getframe(2).f_code.co_filename) == 0 else self._handed(made)

        return named

    def _handed(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, thing in pairs:
            if isinstance(name, _Name) and name.stands_for(thing):  # a method that passes on its base class's
                yield name, thing
                continue
            number, plain = len(self.given), str(name)  # one of ours where an attribute was set by such a name
            self.given.append(plain)
            self._things.append(thing)
            if isinstance(thing, nn.Module):
                self._modules.add(number)
            yield _Name.made(self._renamed.get(number, plain), number, self), thing

    def stands_for(self, number: int, thing: object) -> bool:
        return number < len(self._things) and self._things[number] is thing

    def answer(self, number: int, pattern: object, how: str, *, true: bool) -> bool:
        """Note a question and its answer; what is to be answered."""
        if not isinstance(pattern, str) or isinstance(pattern, _Name):
            return true
        known = self.of_modules if number in self._modules else self.questions
        question = known.get(pattern)
        if question is None:
            question = known[pattern] = Question(pattern, str(here()[0]), _asking(), how)
        question.asked.add(number)
        question.ever = question.ever or true
        if true and pattern:
            self.matched.add(_asking())
        return true or (self._yes is not None and pattern == self._yes[0] and number in self._yes[1])


def _asking() -> object:
    """The function of the project's that asks: comprehensions and lambdas count as the function that they are in."""
    for frame in user_frames(3):
        if not frame.f_code.co_name.startswith("<"):
            return frame.f_code
    return None


def one_step(evidence: Evidence, around: Callable[[], Any], **plan: Any) -> Record | None:
    """The record of a run of one step inside ``around``; None where it raises or cannot be made."""
    if not evidence.repeatable:
        return None
    try:
        record = evidence.rerun(around=around, enough=lambda r: r.rounds >= 1, may_raise=True, **plan)
    except (TrainLoopError, CannotDecide):
        return None
    return record if record.raised is None else None


class _Name(str, StandsIn):
    __slots__ = ("_asked", "_number")
    _asked: AskedNames
    _number: int

    @classmethod
    def made(cls, text: str, number: int, asked: AskedNames) -> _Name:
        made = cls(text)
        made._number, made._asked = number, asked
        return made

    def _derived(self, text: str) -> _Name:
        return _Name.made(text, self._number, self._asked)

    def stands_for(self, thing: object) -> bool:
        return self._asked.stands_for(self._number, thing)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return str, (str(self),)

    __hash__ = str.__hash__

    def __contains__(self, pattern: Any) -> bool:
        return self._asked.answer(self._number, pattern, "in", true=super().__contains__(pattern))

    def __eq__(self, other: object) -> bool:
        return self._asked.answer(self._number, other, "is", true=super().__eq__(other) is True)

    def __ne__(self, other: object) -> bool:
        return not self._asked.answer(self._number, other, "is", true=super().__eq__(other) is True)

    def startswith(self, prefix: Any, *span: Any) -> bool:
        return self._any(super().startswith, "start", prefix, span)

    def endswith(self, suffix: Any, *span: Any) -> bool:
        return self._any(super().endswith, "end", suffix, span)

    def _any(self, test: Callable[..., bool], how: str, given: Any, span: tuple[Any, ...]) -> bool:
        found = test(given, *span)
        for pattern in given if isinstance(given, tuple) else (given,):
            found = self._asked.answer(self._number, pattern, how, true=test(pattern, *span)) or found
        return found

    def find(self, pattern: Any, *span: Any) -> int:
        at = super().find(pattern, *span)
        return max(at, 0) if self._asked.answer(self._number, pattern, "in", true=at >= 0) else at

    def lower(self) -> _Name:
        return self._derived(super().lower())

    def casefold(self) -> _Name:
        return self._derived(super().casefold())

    def replace(self, *args: Any, **kwargs: Any) -> _Name:
        return self._derived(super().replace(*args, **kwargs))

    def removeprefix(self, prefix: str) -> _Name:
        return self._derived(super().removeprefix(prefix))

    def removesuffix(self, suffix: str) -> _Name:
        return self._derived(super().removesuffix(suffix))

    def split(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [self._derived(part) for part in super().split(*args, **kwargs)]

    def rsplit(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [self._derived(part) for part in super().rsplit(*args, **kwargs)]

    def partition(self, separator: str) -> Any:
        return tuple(self._derived(part) for part in super().partition(separator))

    def rpartition(self, separator: str) -> Any:
        return tuple(self._derived(part) for part in super().rpartition(separator))

    def __getitem__(self, index: Any) -> _Name:
        return self._derived(super().__getitem__(index))

    def __add__(self, other: Any) -> Any:
        joined = super().__add__(other)
        return self._derived(joined)

    def __radd__(self, other: Any) -> Any:
        return self._derived(other + str(self)) if isinstance(other, str) else NotImplemented
