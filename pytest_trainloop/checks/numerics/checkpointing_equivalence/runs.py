"""The loop with activation checkpointing, compared with itself with every checkpoint turned into a plain call.

Both runs are made in float64, under one seed, from the same weights, which stay fixed. They make the same operations,
so that gradients agree up to the order in which their terms are summed: 1e3 * eps, as for accumulation. Where they do
not, one thing at a time is put right, and what makes them agree is the cause.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.checkpointing_equivalence.first_difference import CompareRecomputation
from pytest_trainloop.checks.numerics.checkpointing_equivalence.fixed_weights import Run, fixed_weights, values_kept
from pytest_trainloop.checks.numerics.checkpointing_equivalence.passes import (
    difference,
    passes,
    plain_name,
    tensors_apart,
)
from pytest_trainloop.checks.numerics.checkpointing_equivalence.rng_state import RestoreGenerators
from pytest_trainloop.errors import CannotDecide, Unreliable, UsageError, UserCodeError
from pytest_trainloop.gradients.tolerances import RESEEDED, ROUNDING
from pytest_trainloop.recording.samples import as_real
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.checkpoint_bypass import not_reentrant, switched, without, without_cut_off
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.outside_draws import told
from pytest_trainloop.runs.same_start import SameStart

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Sequence

    from pytest_trainloop.checks.numerics.checkpointing_equivalence.first_difference import OtherCall
    from pytest_trainloop.checks.numerics.checkpointing_equivalence.fixed_weights import Grads
    from pytest_trainloop.checks.numerics.checkpointing_equivalence.passes import Difference
    from pytest_trainloop.gradients.compare import Agreement
    from pytest_trainloop.recording.events import CheckpointCall
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

    Contexts = Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]

IN_PLACE = "modified by an inplace operation"

REFUSALS = (
    "different number of tensors was saved",
    "save more tensors during recomputation",
    "different metadata than during the forward",
    "dumping logs of latest computation",
    IN_PLACE,
    "does not require grad",
)
"""Parts of torch's messages where a backward pass finds something else than the forward pass left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a loop computes something else with checkpointing."""

    cause: str
    difference: Difference | None = None
    """Of the gradients; None where fit raised in one of the runs."""
    raised: str = ""
    """What fit raised with checkpointing only."""
    plain_raised: str = ""
    """What fit raised with plain calls only."""
    place: str = ""
    without_gradient: tuple[str, ...] = ()
    """Parameters that get no gradient with checkpointing."""
    generators: tuple[str, ...] = ()
    """Those that were not restored."""
    other: OtherCall | None = None
    """The first call that differs when it is recomputed."""
    own_recomputation: bool = False
    """Whether no checkpoint of torch's was seen."""
    precision: str = "float64"
    """What both runs computed in."""


def checkpoint_knob(evidence: Evidence) -> str | None:
    """The user's keyword that switches checkpointing on or off; None where there is none, or where its values name
    kinds of checkpointing."""
    name = evidence.knobs.get("checkpoint")
    if name is None:
        return None
    parameters = inspect.signature(evidence.make).parameters
    switches = name not in parameters or isinstance(parameters[name].default, bool)
    return name if switches else None


class Checkpointing:
    """The runs behind ``checkpointing_equivalence``."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._rerun = evidence.run(), evidence.plan(), evidence.rerun
        self._outside_draw = functools.partial(told, evidence)
        self._knob = checkpoint_knob(evidence)
        self._start = SameStart(plain_name)
        self._double = True
        self._runs: dict[str, Run] = {}
        self._lowest = "float64"
        self._needed = _passes_needed(self._seen)
        self.place = ""

    def verdict(self) -> Verdict | None:
        """What is wrong, if anything is. Raises ``CannotDecide`` where one of the runs cannot be made, and
        ``Unreliable`` where two identical runs differ."""
        on = self._made("on")
        calls = tuple(c for c in on.record.checkpoints if c.grad_enabled)
        self.place = _place(calls)
        off = self._made("off", _switching(without)) if calls or on.record.raised else on
        if on.record.raised and off.record.raised and self._double and self._seen.raised is None:
            self._double, self._start = False, SameStart(plain_name)
            return self.verdict()
        found = self._by_checkpoint(on, off, calls) if calls else None
        if found is None and self._knob is not None:
            found = self._by_path(off, calls)
        return None if found is None else replace(found, precision=self._lowest)

    def require_recomputation(self) -> None:
        """Raise ``CannotDecide`` where the two ways of the knob call the same modules alike: nothing is recomputed."""
        if self._knob is None or "knob off" not in self._runs:
            return
        on, off = self._runs["on"].record, self._runs["knob off"].record
        if not on.checkpoints and _module_calls(on) == _module_calls(off):
            raise CannotDecide(
                f"with {self._knob}=True nothing was seen to be recomputed: hand the knob on to the model, or leave it "
                "out"
            )

    def tensors_apart(self) -> dict[str, Agreement]:
        """The gradients that differ, without checkpointing and with it, at each parameter."""
        for on, off in (("on", "off"), ("off", "knob off")):
            if on in self._runs and off in self._runs:
                found = tensors_apart(self._runs[on], self._runs[off], self._bound())
                if found:
                    return found
        return {}

    def buffers_updated_twice(self) -> tuple[str, ...]:
        """Buffers that end with other values under checkpointing, where two runs with it agree on them."""
        if "off" not in self._runs:
            return ()
        on, off = self._runs["on"].buffers, self._runs["off"].buffers
        found = tuple(n for n in on if n in off and not _equal(on[n], off[n], self._bound()))
        if not found:
            return ()
        again = self._made("on again").buffers
        return tuple(n for n in found if n in again and _equal(on[n], again[n], self._bound()))

    def counts(self, name: str) -> bool:
        """Whether a buffer holds whole numbers."""
        return not self._runs["on"].buffers[name].dtype.is_floating_point

    def largest_at_the_end(self, name: str) -> tuple[float, float]:
        """The largest entry of a buffer at the end, with checkpointing and without."""
        on, off = (float(self._runs[key].buffers[name].abs().max()) for key in ("on", "off"))
        return on, off

    def _by_checkpoint(self, on: Run, off: Run, calls: Sequence[CheckpointCall]) -> Verdict | None:
        """The checkpoints as they are, compared with plain calls of the same functions."""
        if off.record.raised is not None:
            hidden = self._hidden(on, off, calls)
            if hidden is not None:
                return hidden
            also = "with checkpointing and without" if on.record.raised else "with checkpoints as plain calls"
            raise CannotDecide(f"fit raised {off.record.raised.summary} {also}")
        if not passes(off.record):
            raise CannotDecide("no backward pass was seen: there are no gradients to compare")
        if on.record.raised is not None:
            return self._refused(on, off, calls)
        if len(passes(on.record)) != len(passes(off.record)):
            raise CannotDecide("the loop makes another number of backward passes without checkpointing")
        found = difference(on, off, self._bound())
        if found is None or found.drifted:
            return None
        self._require_repeatable("on", on)
        if found.forward:
            return Verdict(cause="other_computation", difference=found, place=_place(calls))
        return self._cause(off, calls, Verdict(cause="state_changed", difference=found, place=_place(calls)))

    def _hidden(self, on: Run, off: Run, calls: Sequence[CheckpointCall]) -> Verdict | None:
        """A tensor changed before its backward pass: torch refuses that with plain calls, while a checkpoint recomputes
        with the changed tensor."""
        refused = off.record.raised
        if refused is None or on.record.raised is not None or IN_PLACE not in refused.message:
            return None
        comparisons: list[CompareRecomputation] = []
        self._made("moving", self._comparing(comparisons), fixed=False)
        other = next((c.other for c in comparisons if c.other is not None), None)
        if other is None:
            return None
        return Verdict(cause="state_changed", plain_raised=refused.summary, place=_place(calls), other=other)

    def _refused(self, on: Run, off: Run, calls: Sequence[CheckpointCall]) -> Verdict:
        """Fit raises with checkpointing only."""
        raised = on.record.raised
        said = "" if raised is None else f"{raised.summary} {raised.message}"
        if raised is None or not any(words in said for words in REFUSALS):
            raise CannotDecide(f"fit raised {'' if raised is None else raised.summary} with checkpointing only")
        if self._made("on again").record.raised is None:
            raise Unreliable("of two identical runs of the loop one raises: see determinism, and seed what draws there")
        given = Verdict(cause="state_changed", raised=raised.summary, place=_place(calls))
        return self._cause(off, calls, given)

    def _cause(self, off: Run, calls: Sequence[CheckpointCall], given: Verdict) -> Verdict:
        """Put one thing at a time right, and see whether the gradients then agree."""
        cut_off = tuple(c for c in calls if c.reentrant and not c.needs_grad)
        if cut_off and self._agrees("cut off", off, _switching(without_cut_off)):
            reached = tuple(p.name for p in off.record.parameters if off.record.reached(p.index))
            names = given.difference.without_gradient if given.difference is not None else reached
            return replace(given, cause="inputs_need_grad", without_gradient=names, place=_place(cut_off))
        restored = RestoreGenerators()
        if self._agrees("restored", off, _switching(restored)) and restored.moved:
            return replace(given, cause="rng_not_preserved", generators=tuple(restored.moved))
        comparisons: list[CompareRecomputation] = []
        self._made("compared", self._comparing(comparisons))
        other = comparisons[-1].other if comparisons else None
        reentrant = tuple(c for c in calls if c.reentrant)
        if other is None and reentrant and self._agrees("not re-entrant", off, _switching(not_reentrant)):
            return replace(given, cause="side_result_cut", place=_place(reentrant))
        return replace(given, other=other)

    def _comparing(self, into: list[CompareRecomputation]) -> Contexts:
        def contexts(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
            into.append(CompareRecomputation(watch, self._bound()))
            return (switched(into[-1]),)

        return contexts

    def _agrees(self, key: str, off: Run, contexts: Contexts) -> bool:
        made = self._made(key, contexts)
        return made.record.raised is None and difference(made, off, self._bound()) is None

    def _by_path(self, plain: Run, calls: Sequence[CheckpointCall]) -> Verdict | None:
        """The code that the knob switches on, with plain calls, compared with the code that it switches off."""
        other = self._made("knob off", knob=False)
        for made, how in ((other, "without"), (plain, "with")):
            if made.record.raised is not None:
                raise CannotDecide(f"fit raised {made.record.raised.summary} {how} checkpointing only")
        found = difference(plain, other, self._bound())
        if found is None or found.drifted:
            return None
        self._require_repeatable("knob off", other, knob=False)
        quiet = [self._made(f"no randomness {knob}", _no_randomness(plain=knob), knob=knob) for knob in (True, False)]
        if any(made.record.raised is not None for made in quiet):
            raise CannotDecide("fit raised without dropout, so that the draws of the two ways cannot be compared")
        if difference(quiet[0], quiet[1], self._bound()) is None:
            return None if calls or found.forward else _torchs_generator(found)
        reseeded = self._made("reseeded", _no_randomness(plain=False), knob=False, fit_seed=RESEEDED)
        if difference(reseeded, quiet[1], self._bound()) is not None:
            raise CannotDecide(
                f"the loop draws random numbers from python's or numpy's generators{self._outside_draw()}, which the "
                "two ways of the knob need not do in the same order; draw them with torch to have the ways compared"
            )
        place = _place(calls) or found.place
        return Verdict(cause="other_computation", difference=found, place=place, own_recomputation=not calls)

    def _require_repeatable(self, key: str, made: Run, *, knob: bool = True) -> None:
        if difference(made, self._made(f"{key} again", knob=knob), self._bound()) is not None:
            raise Unreliable("two identical runs of the loop differ: see determinism, and seed what draws there")

    def _made(
        self,
        key: str,
        around: Contexts = lambda watch: (),
        *,
        knob: bool = True,
        fit_seed: int | None = None,
        fixed: bool = True,
    ) -> Run:
        """One run; with ``knob``, checkpointing is on. Weights stay where they began if ``fixed``."""
        grads: Grads = {}
        buffers: dict[str, torch.Tensor] = {}

        def contexts(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
            held = (fixed_weights(watch),) if fixed else ()
            return (values_kept(watch, grads, buffers), *held, *around(watch))

        plan = replace(
            self._plan,
            knobs=self._plan.knobs if self._knob is None else {**self._plan.knobs, self._knob: knob},
            contexts=contexts,
            prepare=self._start,
            enough=self._enough,
            double=self._double,
            fit_seed=fit_seed,
            may_raise=True,
        )
        try:
            record = self._rerun(plan)
        except (UserCodeError, UsageError) as refusal:
            if self._knob is None:
                raise
            raise CannotDecide(f"with {self._knob}={knob} the loop could not be run: {refusal}") from refusal
        self._runs[key] = Run(record, grads, buffers)
        if not record.double:
            said = " ".join((*record.lower, *(p.dtype for p in record.parameters))).replace("bfloat16", "bfloat16 ")
            self._lowest = next((d for d in ("bfloat16", "float16") if d in said), "float32")
        return self._runs[key]

    def _enough(self, record: Record) -> bool:
        stepping = [o.index for o in self._seen.optimizers if o.steps]
        stepped = all(i < len(record.optimizers) and record.optimizers[i].steps for i in stepping)
        through = stepped and record.rounds >= 1 and len(record.autograd_passes()) >= self._needed
        return through or record.rounds >= FULL_ROUNDS

    def _bound(self) -> float:
        bound = ROUNDING * float(torch.finfo(getattr(torch, self._lowest)).eps)
        if bound >= 1.0:
            raise CannotDecide(f"the loop computes in {self._lowest} also where float64 is asked for")
        return bound


def _switching(how: Any) -> Contexts:
    return lambda watch: (switched(how),)


def _no_randomness(*, plain: bool) -> Contexts:
    return lambda watch: (*((switched(without),) if plain else ()), NoRandomness())


def _module_calls(record: Record) -> list[tuple[int, int, int]]:
    """How often each parameter's module was called with gradients on, off, and inside a checkpoint."""
    return [(p.calls_with_grad, p.calls_without_grad, p.calls_in_checkpoint) for p in record.parameters]


def _passes_needed(seen: Record) -> int:
    """The backward passes up to the one after which every line that makes checkpoints has made one."""
    first: dict[str, int] = {}
    for call in seen.checkpoints:
        if call.grad_enabled:
            first.setdefault(str(call.place), call.at)
    last = max(first.values(), default=0)
    return 1 + sum(b.at < last for b in seen.autograd_passes())


def _torchs_generator(found: Difference) -> Verdict:
    names = ("torch's generator",)
    return Verdict(
        cause="rng_not_preserved", difference=found, generators=names, own_recomputation=True, place=found.place
    )


def _place(calls: Sequence[CheckpointCall]) -> str:
    return str(calls[0].place) if calls else ""


def _equal(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b) or not a.numel():
        return True
    wide = as_real(a).to(torch.float64), as_real(b).to(torch.float64)
    scale = float(torch.maximum(wide[0].abs(), wide[1].abs()).max())
    return not float((wide[0] - wide[1]).abs().max()) > bound * scale
