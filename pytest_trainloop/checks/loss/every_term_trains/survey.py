"""What the roots of the first steps are sums of, and whether the constants among it move with the weights."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.every_term_trains.names import words_of
from pytest_trainloop.checks.loss.every_term_trains.thrown import ThrownResults
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.ours import is_ours
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.instruments.tracing.batches_taken import batches_taken
from pytest_trainloop.instruments.tracing.root_terms import RootTerms
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.source import here, user_frames
from pytest_trainloop.recording.torch_names import MULTIPLICATIONS
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from pytest_trainloop.checks.loss.every_term_trains.thrown import Thrown
    from pytest_trainloop.instruments.tracing.terms import Scalar, Term, TermsOfRoot
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

ROUNDS = 2
"""Steps of one optimizer whose roots are split into terms: a number that is in both is no constant of the formula."""

STIRS = (0.3, 1.0, 4.0)
"""Of the root mean square of each weight, by which the weights that a root trains are moved; the larger ones where a
value that jumps does not move by the smaller."""


_PRODUCTS = MULTIPLICATIONS | {"__imul__"}

FRAMES = 3
"""Frames of the project that are searched for dicts of terms and weights."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was seen in the first steps."""

    record: Record
    roots: tuple[TermsOfRoot, ...]
    scalars: tuple[Scalar, ...]
    tables: WeightTables
    thrown: tuple[Thrown, ...] = ()

    @classmethod
    def of(cls, evidence: Evidence) -> Survey:
        """To be asked for by ``evidence.shared(Survey.of)``."""
        return cls._seen(evidence, enough=lambda record: record.rounds >= ROUNDS)

    @classmethod
    def in_full(cls, evidence: Evidence) -> Survey:
        """The same over all steps of the watched run."""
        return cls._seen(evidence)

    @classmethod
    def _seen(cls, evidence: Evidence, **changes: Any) -> Survey:
        if not evidence.repeatable:
            return evidence.shared(SurveyInRun.of).survey(evidence.run())
        seen = SurveyInRun()
        record = evidence.rerun(contexts=seen.looking, before_item=seen.terms.take_batch, **changes)
        return seen.made(record)

    def constants(self) -> list[tuple[TermsOfRoot, Term]]:
        """Terms without a history, of roots that have others as well, that are another number in each step: one for
        each line."""
        values = {value for root in self.roots for value in root.live_values}
        seen: dict[tuple[str, str, str], list[tuple[TermsOfRoot, Term]]] = {}
        for root in self.roots:
            if any(term.live for term in root.terms):
                for term in root.terms:
                    if not term.live:
                        seen.setdefault((root.place, term.op, term.place), []).append((root, term))
        found = []
        for of_line in seen.values():
            numbers = {term.value for _, term in of_line}
            constant = len(of_line) > 1 and len(numbers) == 1 and not of_line[0][1].parameters
            elsewhere = all(abs(term.value) in values for _, term in of_line)  # the value of what does train
            if not constant and not elsewhere and not any(math.isnan(number) for number in numbers):
                found.append(of_line[0])
        return found

    def trained_by(self, root: TermsOfRoot) -> frozenset[int]:
        """The parameters that the next steps after a root change and no other loss of the same window trains."""
        passes = self.record.backwards()
        mine = next((b for b in passes if b.at > root.at), None)
        if mine is None:
            return frozenset()
        steps = [s for s in self.record.of(Step) if not s.nested]
        before = max((s.at for s in steps if s.at < mine.at), default=-1)
        first = next((s.at for s in steps if (s.reads[0].at if s.reads else s.at) > mine.at), None)
        if first is None:
            return frozenset(mine.arrivals)
        end = next((b.at for b in passes if b.at > first), math.inf)
        holders = {s.optimizer for s in steps if mine.at < s.until and s.at < end and s.at >= before}
        held = {i for o in self.record.optimizers if o.index in holders for i in o.parameters}
        others = [b for b in passes if before < b.at < end and b.site != mine.site] if len(holders) > 1 else []
        return frozenset(held - {i for b in others for i in b.arrivals})


class SurveyInRun:
    """What an observed run showed while it was watched in full."""

    def __init__(self) -> None:
        self.tables = WeightTables()
        self.terms = RootTerms(self.tables.look)
        self.thrown = ThrownResults(self.terms)

    @classmethod
    def of(cls, _evidence: Evidence) -> SurveyInRun:
        """Of a loop that can be run again nothing is seen by itself."""
        return cls()

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What the run is made in."""
        return (*self.looking(watch), batches_taken(self.terms.take_batch, watch))

    def looking(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """The same where the plan of the run gives the batches."""
        return (*self.terms.contexts(watch), patched(torch.autograd.Function, "apply", self.thrown.around))

    def survey(self, record: Record) -> Survey:
        """Raises ``CannotDecide`` where no backward pass was seen."""
        if not self.terms.roots:
            raise CannotDecide("no single number was backpropagated in the steps that were watched in full")
        return self.made(record)

    def made(self, record: Record) -> Survey:
        """What was seen, after the run."""
        terms = self.terms
        return Survey(record, tuple(terms.roots), tuple(terms.scalars), self.tables, tuple(self.thrown.calls))


class WeightTables:
    """Looks at the products of a run for a dict of terms, and a dict of their weights that calls them by other names.

    Both are in the frames of the project: a dict of single numbers with a history, and one of plain numbers that has a
    key in common with it."""

    def __init__(self) -> None:
        self.unweighted: dict[tuple[str, str], tuple[Scalar, str, float, tuple[str, ...]]] = {}
        """A term that the weights do not name, by its name and that of a weight that no term asks for: with its line,
        that weight, and the names that both dicts have."""
        self._seen: dict[tuple[str, int], int] = {}

    def look(self, name: str, args: tuple[Any, ...], scalar_of: Callable[[torch.Tensor], Scalar | None]) -> None:
        """Gets every call, by ``RootTerms``."""
        if name not in MULTIPLICATIONS | {"__imul__"} or not any(
            isinstance(a, torch.Tensor) and a.numel() == 1 for a in args
        ):
            return
        place, site = here()
        if site:
            self._seen[site[0]] = self._seen.get(site[0], 0) + 1
            if self._seen[site[0]] > 4:
                return
        tables = [table for frame in user_frames(FRAMES) for table in _tables(frame)]
        for terms in tables:
            for weights in tables:
                shared = tuple(name for name in terms if _is_term(terms[name]) and _is_number(weights.get(name)))
                if not shared or any(isinstance(value, torch.Tensor) for value in weights.values()):
                    continue
                absent = [name for name in terms if _is_term(terms[name]) and not weights.get(name)]
                strays = [n for n in weights if n not in terms and _is_number(weights[n]) and weights[n]]
                for term in absent:
                    near, scalar = [stray for stray in strays if _same_thing(term, stray)], scalar_of(terms[term])
                    if len(near) == 1 and scalar is not None:
                        seen = scalar, str(place), float(weights[near[0]]), shared
                        self.unweighted.setdefault((term, near[0]), seen)


def _tables(frame: FrameType) -> Iterator[Mapping[str, Any]]:
    """The dicts with names as keys among the variables of a frame, and among the attributes of its objects."""
    for value in list(frame.f_locals.values()):
        if is_ours(value):
            continue
        inside = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
        for table in (value, *inside[:64]):
            if isinstance(table, Mapping) and 2 <= len(table) <= 64 and all(isinstance(key, str) for key in table):
                yield table


def _is_term(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _same_thing(one: str, other: str) -> bool:
    """Whether two names are of one thing: words in common other than "loss", or one within the other."""
    a, b = (words_of(name) - {"loss", "losses", "weight", "w", "lambda", "coef", "coeff"} for name in (one, other))
    short, long = sorted(("".join(sorted(a)), "".join(sorted(b))), key=len)
    if a & b:
        return True
    same = {x for x in a for y in b if len(min(x, y, key=len)) >= 2 and (x in y or y in x)}
    return bool(same) or (len(short) >= 3 and short in long)


class Moves:
    """Which constants of the first roots move with the weights: each root's own weights are moved, and no step changes
    any, since one that trains another net would."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._base = self._values(frozenset())
        again = self._values(frozenset())
        self._noise = max((_change(a, again.get(key)) for key, a in self._base.items()), default=0.0)

    def of(self, root: TermsOfRoot, term: Term, trained: frozenset[int]) -> float:
        """The relative change of a constant; 0 where it is within rounding."""
        if not trained:
            return 0.0
        key = root.place, term.op, term.place
        for stir in STIRS:
            change = _change(self._base.get(key, ()), self._values(trained, stir).get(key))
            if change > max(ROUNDING * torch.finfo(torch.float32).eps, 10 * self._noise):
                return change
        return 0.0

    def _values(self, moved: frozenset[int], stir: float = 0.0) -> dict[tuple[str, str, str], list[float]]:
        seen, kept = RootTerms(), list[tuple[torch.Tensor, torch.Tensor]]()

        def prepare(watch: Watch) -> None:
            random = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for number, tensor in enumerate(watch.table.tensors):
                    if torch.nn.parameter.is_lazy(tensor) or not tensor.is_floating_point() or tensor.is_meta:
                        continue
                    if number in moved and tensor.numel():
                        size = float(tensor.double().square().mean().sqrt()) or 0.1
                        noise = torch.randn(tensor.shape, generator=random, dtype=torch.float64).to(tensor)
                        tensor.add_(noise, alpha=stir * size)
                    kept.append((tensor, tensor.detach().clone()))

        def put_back(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            with torch.no_grad():
                for tensor, before in kept:
                    write(tensor, before)

        @contextlib.contextmanager
        def held() -> Iterator[None]:
            with hooked(after_steps(put_back)):
                yield

        self._evidence.rerun(
            prepare=prepare,
            contexts=lambda watch: (*seen.contexts(watch), held()),
            before_item=seen.take_batch,
            enough=lambda record: record.rounds >= 1,
            own_steps=True,
        )
        found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for root in seen.roots:
            for term in root.terms:
                if not term.live:
                    found[root.place, term.op, term.place].append(term.value)
        return found


def _change(a: Iterable[float], b: Iterable[float] | None) -> float:
    """The largest relative difference of two series; 0 where one is not there."""
    pairs = list(zip(a, b or (), strict=False))[:1]
    return max((abs(x - y) / max(abs(x), abs(y), 1e-12) for x, y in pairs if math.isfinite(x + y)), default=0.0)
