"""The loop with activation checkpointing, compared with itself with every checkpoint turned into a plain call.

All runs are made in float64, under one seed, from the same weights, which stay fixed: an optimizer that divides by the
size of a gradient would magnify its rounding. They make the same operations, so that gradients agree up to the order in
which their terms are summed: 1e3 * eps, as for accumulation. Where they do not, one thing at a time is put right, and
what makes them agree is the cause.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.checks.numerics.checkpointing_equivalence import causes
from pytest_trainloop.checks.numerics.checkpointing_equivalence.causes import found
from pytest_trainloop.checks.numerics.checkpointing_equivalence.recomputation import OtherCall, Repeated
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide, Unreliable, UsageError, UserCodeError
from pytest_trainloop.core.wording import direction, filled
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.instruments.gradients.compare import Agreement, agreement, by_tensor
from pytest_trainloop.instruments.gradients.tolerances import RESEEDED, ROUNDING
from pytest_trainloop.instruments.gradients.vectors import Gradient, values, vectors
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.instruments.tracing.statements import only_call_in
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.hooks import after_steps, on_gradient
from pytest_trainloop.recording.samples import as_real, readable, spaced
from pytest_trainloop.recording.torch_internals import NORM_MODULES
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.checkpoint_bypass import not_reentrant, switched, without, without_cut_off
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.outside_draws import rng_line
from pytest_trainloop.runs.same_start import SameStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import CheckpointCall
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

    Context = Callable[[Watch], contextlib.AbstractContextManager[Any]]

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


class Pass(NamedTuple):
    """One backward pass."""

    place: str
    losses: tuple[float, ...]
    gradients: Gradient


class Run(NamedTuple):
    """One run."""

    record: Record
    passes: list[Pass]
    """Those from the weights that the run began with."""
    buffers: dict[str, torch.Tensor]
    """At its end."""


class Difference(NamedTuple):
    """The first backward pass whose gradients differ between two runs."""

    nth: int
    """Where the loss of a later pass is the first to differ, generators or some state have advanced otherwise by then,
    and no gradient was wrong."""
    place: str
    forward: bool
    """Whether the losses differ as well."""
    loss: tuple[float, float]
    """What was backpropagated in each run."""
    whole: Agreement
    tensors: dict[str, Agreement]
    names: tuple[str, ...]
    """Parameters whose gradients differ."""
    missing: tuple[str, ...]
    """Those of them that get none in the first run."""


def plain_name(name: str) -> str:
    """The name that a parameter has in a model that is not wrapped."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def checkpoint_knob(evidence: Evidence) -> str | None:
    """The user's keyword that switches checkpointing on or off; None where there is none, or where its values name
    kinds of checkpointing."""
    name = evidence.knobs.get("checkpoint")
    if name is None:
        return None
    parameters = inspect.signature(evidence.make).parameters
    return name if name not in parameters or isinstance(parameters[name].default, bool) else None


class Checkpointing:
    """The runs behind ``checkpointing_equivalence``."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence, self._seen, self._plan = evidence, evidence.run(), evidence.plan()
        self._knob = checkpoint_knob(evidence)
        self._start = SameStart(plain_name)
        self._double = True
        self._runs: dict[str, Run] = {}
        self._lowest = "float64"
        self._place = ""
        self.tensor_differences: dict[str, Agreement] = {}
        """The gradients that differ, without checkpointing and with it, at each parameter."""
        first: dict[str, int] = {}
        for call in self._seen.checkpoints:
            if call.grad_enabled:
                first.setdefault(str(call.place), call.at)
        last = max(first.values(), default=0)
        # up to the backward pass after which every line that makes checkpoints has made one
        self._needed = 1 + sum(b.at < last for b in self._seen.autograd_passes())

    def other_gradients(self) -> Finding | None:
        """What is wrong, if anything is. Raises ``CannotDecide`` where one of the runs cannot be made, and
        ``Unreliable`` where two identical runs differ."""
        on = self._made("on")
        calls = [c for c in on.record.checkpoints if c.grad_enabled]
        self._place = str(calls[0].place) if calls else ""
        off = self._made("off", _plain) if calls or on.record.raised else on
        if on.record.raised and off.record.raised and self._double and self._seen.raised is None:
            self._double, self._start = False, SameStart(plain_name)
            return self.other_gradients()
        finding = self._by_checkpoint(on, off, calls) if calls else None
        return self._by_path(off, calls) if finding is None and self._knob is not None else finding

    def _by_checkpoint(self, on: Run, off: Run, calls: Sequence[CheckpointCall]) -> Finding | None:
        """The checkpoints as they are, compared with plain calls of the same functions."""
        raised, refused = on.record.raised, off.record.raised
        if refused is not None:
            # a tensor changed before its backward pass: a checkpoint recomputes with the changed one
            if raised is None and IN_PLACE in refused.message and (call := self._other_call("moving", fixed=False)):
                measured = filled(causes.PLAIN_RAISED, {"raised": refused.summary})
                return self._state_changed(call, (), measured, repair=causes.BACKWARD_FIRST)
            also = "with checkpointing and without" if raised else "with checkpoints as plain calls"
            raise CannotDecide(f"fit raised {refused.summary} {also}")
        if not off.passes:
            raise CannotDecide("no backward pass was seen: there are no gradients to compare")
        differs = None
        if raised is not None:
            if not any(words in f"{raised.summary} {raised.message}" for words in REFUSALS):
                raise CannotDecide(f"fit raised {raised.summary} with checkpointing only")
            if self._made("on again").record.raised is None:
                raise Unreliable(
                    "of two identical runs of the loop one raises: see determinism, and seed what draws there"
                )
        else:
            if len(on.passes) != len(off.passes):
                raise CannotDecide("the loop makes another number of backward passes without checkpointing")
            differs = self._difference(on, off)
            if differs is None or (differs.forward and differs.nth):
                return None
            self.tensor_differences = differs.tensors
            self._require_repeatable("on", on)
            if differs.forward:
                return self._other_computation(differs, self._place)
        return self._recomputed_otherwise(off, calls, differs, raised.summary if raised is not None else "")

    def _recomputed_otherwise(
        self, off: Run, calls: Sequence[CheckpointCall], differs: Difference | None, raised: str
    ) -> Finding:
        """Put one thing at a time right, and see whether the gradients then agree."""
        names, missing = (differs.names, differs.missing) if differs else ((), ())
        cut_off = [c for c in calls if c.reentrant and not c.needs_grad]
        if cut_off and self._agrees("cut off", off, lambda watch: switched(without_cut_off)):
            if differs is None:
                missing = tuple(p.name for p in off.record.parameters if off.record.reached(p.index))
            culprits = missing or names or ("every parameter",)
            facts = {"part": bool(differs and not missing), "several": len(culprits) > 1}
            return found("inputs_need_grad", cut_off[0], culprits, **facts, measured=self._measured(differs, raised))
        restored = Repeated()
        if self._agrees("restored", off, restored.during) and restored.moved:
            own = any("of its own" in name for name in restored.moved)
            variant = "torch's" if [*restored.moved] == ["torch's generator"] else "own generator" if own else ""
            measured = self._measured(differs, raised)
            drawn = {"change": restored.drawn_at} if restored.drawn_at and variant != "torch's" else {}
            return found("rng_not_preserved", self._place, restored.moved, variant, measured=measured, **drawn)
        call = self._other_call("compared")
        reentrant = [c for c in calls if c.reentrant]
        if call is None and reentrant and self._agrees("not re-entrant", off, lambda watch: switched(not_reentrant)):
            culprits = names or ("checkpoint",)
            several, measured = len(culprits) > 1, self._measured(differs, raised)
            return found("side_result_cut", reentrant[0], culprits, several=several, measured=measured)
        return self._state_changed(call, names, self._measured(differs, raised))

    def _by_path(self, plain: Run, calls: Sequence[CheckpointCall]) -> Finding | None:
        """The code that the knob switches on, with plain calls, compared with the code that it switches off."""
        other = self._made("knob off", knob=False)
        for made, how in ((other, "without"), (plain, "with")):
            if made.record.raised is not None:
                raise CannotDecide(f"fit raised {made.record.raised.summary} {how} checkpointing only")
        differs = self._difference(plain, other)
        if differs is None or (differs.forward and differs.nth):
            return None
        self.tensor_differences = differs.tensors
        self._require_repeatable("knob off", other, knob=False)
        on = self._made("no randomness True", _plain, draws=False)
        off = self._made("no randomness False", knob=False, draws=False)
        if on.record.raised is not None or off.record.raised is not None:
            raise CannotDecide("fit raised without dropout, so that the draws of the two ways cannot be compared")
        if self._difference(on, off) is None:
            if calls or differs.forward:
                return None
            names, measured = ("torch's generator",), self._measured(differs)
            change = only_call_in(self._evidence.shared(MadeAt.of).forward([""]), "apply")
            facts = {"measured": measured, "change": change}
            return found("rng_not_preserved", differs.place, names, "own recomputation", **facts)
        if self._difference(self._made("reseeded", knob=False, draws=False, fit_seed=RESEEDED), off) is not None:
            raise CannotDecide(
                f"the loop draws random numbers from python's or numpy's generators{rng_line(self._evidence)}, which "
                "two settings of the knob need not do in the same order; draw them with torch to have them compared"
            )
        return self._other_computation(differs, self._place or differs.place)

    def _state_changed(self, other: OtherCall | None, names: Sequence[str], measured: str, **given: str) -> Finding:
        if other is None:
            return found("state_changed", self._place, names or ("checkpoint",), measured=measured, **given)
        culprits = [name for name in (other.call.module, other.call.op) if name]
        variant = "another call" if other.instead else "another result"
        facts = {"call": str(other.call), "instead": other.instead, "by": other.by, "measured": measured, **given}
        return found("state_changed", other.place, culprits, variant, **facts)

    def _other_computation(self, differs: Difference, where: str) -> Finding:
        culprits = tuple(dict.fromkeys((*differs.missing, *differs.names))) or ("loss",)
        facts = {"left_out": differs.missing, "several": len(differs.missing) > 1, "measured": self._measured(differs)}
        variant = "" if differs.forward else "same loss"
        return found("other_computation", where, culprits, variant, **facts)

    def _measured(self, differs: Difference | None, raised: str = "") -> str:
        if differs is None:
            return filled(causes.RAISED, {"raised": raised})
        on, off = differs.loss
        facts: dict[str, Any] = {
            "both": not differs.forward,
            "on": on,
            "off": off,
            "difference": differs.whole.difference,
        }
        facts |= {"direction": direction(differs.whole.cosine), "parameters": len(differs.names)}
        return filled(causes.DIFFER, {**facts, "precision": self._lowest})

    def moved_buffers(self) -> Finding | None:
        """Buffers that end with other values under checkpointing, where two runs with it agree on them; without the
        statistics of norms whose momentum is made for two updates a step, and without counts of batches that no other
        statistic of the norm follows. They are a fault where the knob declares that checkpointing changes nothing, and
        more than counts differ."""
        if "off" not in self._runs:
            return None
        on, off, bound = self._runs["on"].buffers, self._runs["off"].buffers, self._bound()
        names = [n for n in on if n in off and not _equal(on[n], off[n], bound)]
        again = self._made("on again").buffers if names else {}
        names = [n for n in names if n in again and _equal(on[n], again[n], bound)]
        if not names:
            return None
        norms = {
            ".".join(filter(None, (prefix, path))): module
            for prefix, model in self._evidence.fresh_loop().modules.items()
            for path, module in members.named_modules(model)
            if isinstance(module, NORM_MODULES)
        }
        # norms that are right all the same (odd: momentum_made_for_the_recomputation)
        kept = [n for n in names if not _made_for_two(norms.get(n.rpartition(".")[0]))]
        # counts that only cumulative averages read (odd: cumulative_average_under_a_checkpoint)
        followed = {n.rpartition(".")[0] for n in kept if not n.endswith("num_batches_tracked")}
        kept = [n for n in kept if n.rpartition(".")[0] in followed or n.rpartition(".")[0] not in norms]
        if not kept:
            return None
        shown = next((n for n in kept if n.endswith("num_batches_tracked")), kept[0])
        largest = [float(buffers[shown].abs().max()) for buffers in (on, off)]
        values_differ = any(on[n].dtype.is_floating_point for n in kept)
        fault = self._knob is not None and values_differ
        facts = {"buffer": shown, "on": largest[0], "off": largest[1], "level": "fault" if fault else "advice"}
        variant = "no knob" if values_differ and not fault else ""
        return found("statistics_updated_twice", self._place, kept, variant, **facts)

    def require_recomputation(self) -> None:
        """Raise ``CannotDecide`` where the two settings of the knob make the same module calls: nothing is
        recomputed."""
        if self._knob is None or "knob off" not in self._runs:
            return
        on, off = self._runs["on"].record, self._runs["knob off"].record
        calls = [
            [(p.calls_with_grad, p.calls_without_grad, p.calls_in_checkpoint) for p in r.parameters] for r in (on, off)
        ]
        if not on.checkpoints and calls[0] == calls[1]:
            raise CannotDecide(
                f"with {self._knob}=True nothing was seen to be recomputed: hand the knob on to the model, or leave it "
                "out"
            )

    def _difference(self, on: Run, off: Run) -> Difference | None:
        """None where the passes that both runs have agree within the bound, relative to the larger gradient. Compared
        are the parameters that an optimizer holds and that are not declared frozen; all where there is no optimizer."""
        bound, record = self._bound(), off.record
        held = record.held or {p.index: () for p in record.parameters}
        judged = {plain_name(record.name(i)) for i in held if not record.declared_frozen(record.name(i))}
        for nth, (a, b) in enumerate(zip(on.passes, off.passes, strict=False)):
            mine, others = ({n: g for n, g in p.gradients.items() if n in judged} for p in (a, b))
            both = vectors([others, mine])
            if not any(bool(torch.isfinite(v).all()) for v in both):
                raise CannotDecide("the gradients are not finite, with checkpointing and without (see finite)")
            whole = agreement(*both)
            if whole.difference <= bound:
                continue
            tensors = by_tensor(others, mine)
            names = tuple(sorted(n for n, one in tensors.items() if not one.difference <= bound))
            missing = tuple(n for n in names if n not in mine)
            pairs = zip(a.losses, b.losses, strict=False)
            near = all(math.isclose(x, y, rel_tol=bound) or (x != x and y != y) for x, y in pairs)
            forward = not near or len(a.losses) != len(b.losses)
            loss = math.fsum(a.losses), math.fsum(b.losses)
            return Difference(nth, b.place, forward, loss, whole, tensors, names, missing)
        return None

    def _agrees(self, key: str, off: Run, around: Context) -> bool:
        made = self._made(key, around)
        return made.record.raised is None and self._difference(made, off) is None

    def _other_call(self, key: str, *, fixed: bool = True) -> OtherCall | None:
        """The first call of torch that a recomputation makes otherwise, with every generator restored."""
        repeated = Repeated(self._bound())
        self._made(key, repeated.during, fixed=fixed)
        return repeated.other

    def _require_repeatable(self, key: str, made: Run, *, knob: bool = True) -> None:
        if self._difference(made, self._made(f"{key} again", knob=knob)) is not None:
            raise Unreliable("two identical runs of the loop differ: see determinism, and seed what draws there")

    def _made(
        self,
        key: str,
        around: Context | None = None,
        *,
        knob: bool = True,
        draws: bool = True,
        fixed: bool = True,
        fit_seed: int | None = None,
    ) -> Run:
        """One run; with ``knob``, checkpointing is on. Weights stay where they began if ``fixed``."""
        grads: dict[int, dict[int, torch.Tensor]] = {}
        buffers: dict[str, torch.Tensor] = {}

        def contexts(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
            yield _kept(watch, grads, buffers, fixed=fixed)
            yield from (around(watch),) if around is not None else ()
            yield from () if draws else (NoRandomness(),)

        knobs = self._plan.knobs if self._knob is None else {**self._plan.knobs, self._knob: knob}
        try:
            record = self._evidence.rerun(
                self._plan,
                knobs=knobs,
                contexts=contexts,
                prepare=self._start,
                enough=self._enough,
                double=self._double,
                fit_seed=fit_seed,
                may_raise=True,
            )
        except (UserCodeError, UsageError) as refusal:
            if self._knob is None:
                raise
            raise CannotDecide(f"with {self._knob}={knob} the loop could not be run: {refusal}") from refusal
        self._runs[key] = Run(record, _passes(record, grads), buffers)
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


def _plain(_watch: Watch) -> contextlib.AbstractContextManager[None]:
    return switched(without)


def _passes(record: Record, grads: dict[int, dict[int, torch.Tensor]]) -> list[Pass]:
    """The backward passes from the weights that the run began with; of several within one step, the first. Gradients
    are the contents of ``.grad`` after a pass; what arrived last where nothing was accumulated, as with
    ``torch.autograd.grad``."""
    no_steps = not any(o.steps for o in record.optimizers)
    until = min((m.at for m in record.moves), default=math.inf) if no_steps else math.inf
    steps, taken, passes = record.of(Step), set[int](), list[Pass]()
    for backward in record.autograd_passes():
        around = next((i for i, s in enumerate(steps) if s.at < backward.at < s.until), None)
        if around is not None and around in taken:
            continue
        taken |= set() if around is None else {around}
        if backward.at >= until:
            continue
        gradients, accumulated = Gradient(), grads.get(backward.at, {})
        for index, arrived in backward.arrivals.items():
            name, last = plain_name(record.name(index)), arrived[-1].incoming
            if index in accumulated:
                gradients[name] = as_real(accumulated[index]).reshape(-1).to("cpu", torch.float64)
            elif last.raw and not last.sparse:
                gradients[name] = values(last, record.parameters[index].dtype)
        passes.append(Pass(str(backward.place), tuple(root.value for root in backward.roots), gradients))
    return passes


@contextlib.contextmanager
def _kept(
    watch: Watch, grads: dict[int, dict[int, torch.Tensor]], buffers: dict[str, torch.Tensor], *, fixed: bool
) -> Iterator[None]:
    """Keep gradients as they are accumulated, by pass and parameter, and the buffers at the end; with ``fixed`` weights
    are restored after every optimizer step."""
    start = [
        (tensor, tensor.detach().clone())
        for tensor in watch.table.tensors
        if fixed and not torch.nn.parameter.is_lazy(tensor) and not tensor.is_meta
    ]

    def restore(*_: Any) -> None:
        with watch.suspended(), torch.no_grad():
            for tensor, first in start:
                if tensor.shape == first.shape and tensor.dtype == first.dtype and not torch.equal(tensor, first):
                    write(tensor, first)

    def note(index: int, tensor: torch.Tensor) -> None:
        if watch.backward is not None and tensor.grad is not None and tensor.grad.layout is torch.strided:
            with watch.suspended(), torch.no_grad():
                grads.setdefault(watch.backward.at, {})[index] = spaced(tensor.grad.detach()).clone()

    leaves = [(i, t) for i, t in enumerate(watch.table.tensors) if t.is_leaf and t.requires_grad and readable(t)]
    handles = [on_gradient(tensor, functools.partial(note, index), after=True) for index, tensor in leaves]
    try:
        with hooked(*filter(None, handles), after_steps(restore)):
            yield
    finally:
        with watch.suspended(), torch.no_grad():
            for path, module in watch.table.named_modules():
                for name, buffer in members.named_buffers(module, recurse=False):
                    if readable(buffer) and buffer.layout is torch.strided:
                        buffers[f"{path}.{name}" if path else name] = buffer.detach().clone()


def _made_for_two(norm: Any) -> bool:
    """Whether two updates with its momentum are one with a momentum m of at most two digits: it is 1 - sqrt(1 - m), to
    as many digits as it is given with, and to three at least."""
    if norm is None or norm.momentum is None or not 0 < norm.momentum < 1:
        return False
    once = float(f"{1 - (1 - norm.momentum) ** 2:.2g}")
    digits = len(repr(norm.momentum).lstrip("0.").replace(".", ""))
    return digits >= 3 and float(f"{1 - (1 - once) ** 0.5:.{min(digits, 12)}g}") == float(f"{norm.momentum:.12g}")


def _equal(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    one, two = (as_real(t).to(torch.float64) for t in (a, b))
    return not float((one - two).abs().max()) > bound * float(torch.maximum(one.abs(), two.abs()).max())
