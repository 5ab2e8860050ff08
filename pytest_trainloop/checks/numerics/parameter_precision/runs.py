"""Further runs: of float32 masters that are overwritten with their copies, and of averages that never move."""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.parameter_precision.causes import found
from pytest_trainloop.core import members
from pytest_trainloop.instruments.gradients.vectors import values
from pytest_trainloop.instruments.optimizers.lost_updates import (
    MOST_STEPS,
    EntryUpdates,
    LostUpdates,
    spaced_by_index,
    summed,
)
from pytest_trainloop.instruments.optimizers.spacing import spacings
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import ADDITIONS
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import around_steps, hooked, unless_suspended
from pytest_trainloop.runs.reachable_state.snapshot import Reach

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}

HALF = 0.5
"""Share of an average's entries that must keep their bits."""

LEAST_LOOKS = 4
"""The values before each of three steps, and after."""

LONGER = 5
"""Times as many steps for a displaced average to come back: 60 updates of a sixteenth of a ULP."""

AWAY = 1 / 8
"""By which share of its size it is displaced: 16 ULPs of bfloat16 or more."""

EXACT = 1e-6
"""How far a change may be from w (p - a), relative to its own size: float64 leaves 1e-9 of it where p and a
differ by 1e-4."""

_UPDATES = ADDITIONS | {"add_", "__iadd__", "iadd", "lerp", "lerp_", "copy_", "_foreach_lerp_", "_foreach_add_"}

Values = dict[str, torch.Tensor]
"""Sampled entries by the path of the tensor, or by the name of the parameter."""


def overwritten_masters(evidence: Evidence) -> list[LostUpdates]:
    """The updates of float32 masters that are overwritten with their own low-precision copies, by copy.

    Such a master holds values of the copy's dtype whenever a step begins: those that the step before left in it,
    rounded. A master that is set once (from pretrained weights), or that stays as the step left it, holds other values.
    """
    seen = evidence.run()
    moved = seen.moved_outside_steps()
    shapes = {p.shape for p in seen.parameters if p.dtype == "float32" and p.index in seen.held}
    names = {p.name for p in seen.parameters if p.dtype in LOW and p.shape in shapes and p.index in moved}
    if not names:
        return []
    befores, afters = defaultdict[int, list[torch.Tensor]](list), defaultdict[int, list[torch.Tensor]](list)
    copies: dict[int, list[int]] = {}  # low-precision tensors that held a master's values before every step so far

    def take(watch: Watch, optimizer: Any) -> dict[int, torch.Tensor]:
        masters, tensors = {}, watch.table.tensors
        for p in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
            index = watch.table.index(p)
            if index is not None and p.dtype is torch.float32 and p.grad is not None and readable(p):
                masters[index] = spaced_by_index(p.detach()).clone()
                same = [i for i in copies.get(index, range(len(tensors))) if tensors[i].dtype in LOW.values()]
                same = [i for i in same if readable(tensors[i]) and tensors[i].shape == p.shape]
                copies[index] = [i for i in same if bool((tensors[i].detach() == p).all())]
        return masters

    def use(watch: Watch, _optimizer: Any, masters: dict[int, torch.Tensor]) -> None:
        for index, entries in masters.items():
            if len(befores[index]) < MOST_STEPS:
                befores[index].append(entries)
                afters[index].append(spaced_by_index(watch.table.tensors[index].detach()).clone())

    record = evidence.rerun(contexts=lambda watch: (around_steps(watch, partial(take, watch), partial(use, watch)),))
    lost = []
    for index, p in ((index, record.parameters[i]) for index, same in copies.items() for i in same):
        rounded = [entries.to(LOW[p.dtype]).float() for entries in afters[index]]
        # something else moves weights that a step does not find as the step before left them, rounded
        taken_over = all(map(torch.equal, rounded, befores[index][1:]))
        if p.name in names and taken_over:
            updates = []
            for before, after, low in zip(befores[index], afters[index], rounded, strict=True):
                due = after.double() - before.double()
                counted, ulp = due.isfinite() & (due != 0), spacings(before.double(), p.dtype)
                updates.append(
                    EntryUpdates(before.double(), due, low.double(), counted, counted & (low == before), ulp)
                )
            lost.append(summed(p, updates, master_overwritten=True))
    return lost


def lost_averages(evidence: Evidence) -> Iterator[Finding]:
    """Averages of weights, and other running values, that rest where float64 moves them and stay where they are put.

    In float64 an average a changes between two steps by w (p - a), with one weight w for all entries of the trained p;
    no other rule moves it so. Given w, half a ULP at an entry's value says how far p must be away before it moves.
    """
    if not evidence.repeatable and not _resting_copies(evidence.run()):
        return
    candidates = evidence.shared(low_values)
    low = _Run(evidence, candidates).looks if candidates else []
    if len(low) < LEAST_LOOKS:
        return
    resting = [path for path in candidates if _rests([look.get(path) for look in low])]
    if not resting:
        return
    wide, known = _Run(evidence, resting, double=True, may_raise=True), dict[str, dict[str, Any]]()
    for path in resting:
        first, last = low[0][path], low[-1][path]
        looks = [look[path] for look in wide.looks if path in look and look[path].dtype is torch.float64]
        fits = (blend_weights(looks, trained) for trained in wide.trained.values())
        weight = next((max(weights) for weights in fits if len(weights) >= LEAST_LOOKS - 1), 0.0)
        at, dtype = first[first == last].double(), str(first.dtype).removeprefix("torch.")
        ulp = spacings(at, dtype)
        needed = float((ulp / 2 / (weight * at.abs()).clamp_min(1e-300)).median())
        averages = weight > 0.0 and needed >= 1.0  # an average with a larger weight follows, late and coarsely
        if averages or (not candidates[path] and len(looks) >= max(LEAST_LOOKS, len(wide.looks)) and _moves(looks)):
            largest = max(float((b - a).abs().max()) for a, b in itertools.pairwise(looks))
            known[path] = {"averages": averages, "weight": weight, "needed": needed, "dtype": dtype}
            known[path] |= {"largest": largest, "ulp": float(ulp.median()), "steps": len(low) - 1}
    if not known:
        return
    names, kept, lost = dict[str, str](), dict[str, torch.Tensor](), _LostWrite()

    def displace(watch: Watch, loop: TrainLoop) -> None:
        reach = Reach.of(loop)
        for path in known:
            value = reach.value(path)
            # between the same two powers of 2: its ULP stays
            larger = value * (1.0 + AWAY)
            crosses = torch.frexp(larger.float()).exponent != torch.frexp(value.float()).exponent
            value.copy_(torch.where(crosses, value / (1.0 + AWAY), larger))
            kept[path], index = value.detach().clone(), watch.table.index(value)
            names[path] = path if index is None else watch.table.entries[index].name
        lost.kept = list(kept.values())

    again = _Run(
        evidence,
        known,
        displace,
        lost.contexts,
        count=LONGER * evidence.plan().count,
        enough=lambda record: record.rounds >= LONGER * FULL_ROUNDS,
    )
    if again.record.rounds < LONGER * FULL_ROUNDS // 2:
        return  # too few for it to come back
    # what is copied from a better average comes back (odd: bf16_copy_of_a_float32_average)
    staying = [path for path in known if _rests([spaced_by_index(kept[path]), again.end.get(path)])]
    for kind in dict.fromkeys((known[path]["averages"], known[path]["dtype"]) for path in staying):
        paths = [path for path in staying if (known[path]["averages"], known[path]["dtype"]) == kind]
        culprits, variant = [names[path] for path in paths], "" if kind[0] else "running value"
        facts = {**known[paths[0]], "tensor": culprits[0], "several": len(paths) > 1, "displaced": again.record.rounds}
        yield found("average_lost", lost.place, culprits, variant, **facts)


def low_values(evidence: Evidence) -> dict[str, bool]:
    """Paths of low-precision tensors that no optimizer holds, and that are neither gradients nor data; of weights those
    shaped like a trained one. True for a weight of a declared module and for what requires gradients: it is an average
    only if it follows one weight, since copies of masters move too (faulty: masters_loaded_anew_in_every_step)."""
    record, loop, paths = evidence.run(), evidence.fresh_loop(), dict[str, bool]()
    reach, trained = Reach.of(loop), {record.parameters[i].shape for i in record.held}
    declared = {id(p) for module in loop.modules.values() for p in members.parameters(module)}
    held = {id(p) for o in loop.optimizers for group in getattr(o, "param_groups", ()) for p in group["params"]}
    for path, leaf in reach.leaves.items():
        value = reach.value(path)
        if leaf.kind not in ("tensor", "buffer", "weight") or not isinstance(value, torch.Tensor):
            continue
        if value.dtype in LOW.values() and id(value) not in held and readable(value) and value.numel():
            follows = value.requires_grad or id(value) in declared
            if tuple(value.shape) in trained or not (follows or leaf.kind == "weight"):
                paths[path] = follows
    return paths


def _resting_copies(record: Record) -> bool:
    """Whether a low-precision tensor shaped like a trained one, that no optimizer holds, keeps most of its entries."""
    trained = {record.parameters[i].shape for i in record.held}
    for p in record.parameters:
        low = p.dtype in LOW and p.index not in record.held and p.shape in trained
        if low and not p.gone and p.index in record.end and p.start.raw:
            start, end = values(p.start, p.dtype), values(record.end[p.index], p.dtype)
            if len(start) == len(end) and float((start == end).double().mean()) >= HALF:
                return True
    return False


class _Run:
    """A further run: sampled entries of some tensors before each of its first steps, and at its end."""

    def __init__(
        self,
        evidence: Evidence,
        paths: Collection[str],
        prepare: Callable[[Watch, TrainLoop], None] = lambda watch, loop: None,
        contexts: Callable[[Watch], Iterable[Any]] = lambda watch: (),
        **changes: Any,
    ) -> None:
        self.looks: list[Values] = []
        self.trained: dict[str, list[torch.Tensor]] = defaultdict(list)
        plan, held = evidence.plan(), {evidence.run().name(i) for i in evidence.run().held}

        def fit(loop: TrainLoop) -> Callable[[Any], Any]:
            self._loop = loop
            return plan.fit(loop)

        def look(watch: Watch, *_call: Any) -> None:
            if len(self.looks) < FULL_ROUNDS:
                with watch.suspended(), torch.no_grad():
                    self.looks.append(self._values(paths))
                    for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                        if entry.name in held and readable(tensor) and tensor.dtype is torch.float64:
                            self.trained[entry.name].append(spaced_by_index(tensor).clone())

        def around(watch: Watch) -> Iterable[Any]:
            return hooked(before_steps(unless_suspended(watch, partial(look, watch)))), *contexts(watch)

        def prepared(watch: Watch) -> None:
            with torch.no_grad():
                prepare(watch, self._loop)

        self.record = evidence.rerun(fit=fit, prepare=prepared, contexts=around, **changes)
        self.end = self._values(paths)
        self.looks += [self.end] if len(self.looks) < FULL_ROUNDS else []

    def _values(self, paths: Iterable[str]) -> Values:
        reach, found = Reach.of(self._loop), {}
        for path in paths:
            value = reach.value(path) if path in reach.leaves else None
            if isinstance(value, torch.Tensor) and readable(value):
                found[path] = spaced_by_index(value.detach()).clone()
        return found


class _LostWrite(WatchingMode):
    """Notes the first line that computes what one of the tensors ``kept`` holds already."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.place = ""

    def active(self) -> bool:
        return not self.place and bool(self.watch.record.steps) and super().active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        if name in _UPDATES:
            with self.watch.suspended(), torch.no_grad():
                for made in tensors_in(out):
                    same = (k for k in self.kept if k.shape == made.shape and k.dtype is made.dtype)
                    if not self.place and any(float((k == made).double().mean()) >= HALF for k in same):
                        self.place = str(here()[0])
        return out


def blend_weights(copy: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> list[float]:
    """By change of a copy, the one weight of its distance to the trained tensor; nothing where it moves otherwise."""
    weights: list[float] = []
    for (a, p), (a_next, p_next) in itertools.pairwise(zip(copy, trained, strict=False)):
        change = a_next - a
        if not bool(change.any()):
            continue
        for away in (q - a for q in (p_next, p) if len(q) == len(a)):
            length = float(away @ away)
            weight = float(change @ away) / length if length > 0.0 else 0.0
            left, rounding = float((change - weight * away).abs().max()), 16 * torch.finfo(torch.float64).eps
            if left <= EXACT * float(change.abs().max()) + rounding * float(a.abs().max()) and 0.0 < weight < 1.0:
                weights.append(weight)
                break
        else:
            return []
    return weights


def _rests(steps: Sequence[torch.Tensor | None]) -> bool:
    """Whether most entries that are not zero keep their bits over all steps."""
    first = steps[0]
    if first is None or any(s is None or s.shape != first.shape for s in steps):
        return False
    same = torch.ones_like(first, dtype=torch.bool)
    for step in steps[1:]:
        same &= step == first
    return float((same & (first != 0)).double().mean()) >= HALF


def _moves(steps: Sequence[torch.Tensor]) -> bool:
    """Whether most entries change at every step but the first, before which an average may not have begun; a table
    that is set once does not (odd: fixed_tables_in_bfloat16)."""
    return all(float((b != a).double().mean()) > HALF for a, b in itertools.pairwise(steps[1:]))
