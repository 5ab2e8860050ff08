"""Which operation keeps a gradient from parameters: candidates, each tried in a run of its own.

The loop is run again with a candidate left out (a detach that passes its input on, a no_grad that is none, a rounding
that is straight-through): if the gradient is there now, that operation is the cut. Where an operation cannot be left
out (numpy, float), its result is moved instead: if the loss changes, the value passes there without its gradient.
What a cut gave is then followed, since the line to change may be another one.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.consequences import TRAINING
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.causes import found
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.gradients.dependence import difference, roots_before_first_step, until_stepped
from pytest_trainloop.instruments.gradients.tolerances import CANCELLATION
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.instruments.tracing.cut_candidates import Candidate, Kind, Tracer
from pytest_trainloop.instruments.tracing.definitions import value
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.instruments.tracing.statements import behind_return, without_gradients
from pytest_trainloop.recording.events import Backward, Step
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import (
    ATEN_COMPARISONS,
    DISTANCE_LOSSES,
    MULTIPLICATIONS,
    PRODUCTS,
    SUBTRACTIONS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

MOST_TRIED = 16
"""Candidates tried one by one, those nearest to the loss first."""

MOST_KEPT = 256
"""Results that are followed."""

LEAST_STEPS = 3
"""Steps of an optimizer without any gradient in one run, from which they are reported."""

_WRITTEN = {"data": ".data", "__float__": "float()", "__int__": "int()", "__array__": "numpy", "numpy": ".numpy()"}
_COMPARISONS = DISTANCE_LOSSES | {"kl_div", "cross_entropy", "cosine_similarity"}


@dataclass(frozen=True, slots=True)
class Cut:
    """The operation where the gradient is lost."""

    candidate: Candidate
    gradient: float | None
    """The largest entry that arrives with it left out; None where its result was moved instead."""
    moved: float = 0.0
    """By how much the loss changed then."""
    reached: frozenset[str] = frozenset()
    """Parameters that get a gradient with it left out."""
    fired: frozenset[str] = frozenset()
    """Those that get one, even of zeros."""
    others: tuple[Candidate, ...] = ()
    """Operations that had to be left out as well, on other paths to the loss."""

    @property
    def module(self) -> str:
        return f" in {self.candidate.module}" if self.candidate.module else ""


def search(evidence: Evidence, names: Sequence[str], kinds: set[Kind]) -> tuple[Cut | None, set[str]]:
    """The operation of these kinds that keeps the gradient from these parameters, if any; and the names of all
    parameters that entered some computation. Nothing where the loop cannot be run again."""
    if not evidence.repeatable:
        return None, set()
    listed, tracer = _traced(evidence, names)
    touched = {listed.parameters[i].name for i in tracer.touched}
    candidates = [c for c in reversed(tracer.found.values()) if c.kind in kinds]
    if cut := _proven(evidence, names, [c for c in candidates if c.kind != "custom"]):
        return cut, touched
    if broken := next((c for c in candidates if c.kind == "custom"), None):
        return Cut(broken, None), touched
    base = roots_before_first_step(listed, names)
    for candidate in candidates[:MOST_TRIED]:
        if candidate.kind in ("value", "detach", "grad_off"):
            record, _ = _traced(evidence, names, [candidate], nudge=True)
            moved = difference(base, roots_before_first_step(record, names))
            if moved > 1e-6:
                return Cut(candidate, None, moved), touched
    return None, touched


def _traced(
    evidence: Evidence, names: Sequence[str], chosen: Sequence[Candidate] = (), *, nudge: bool = False
) -> tuple[Record, Tracer]:
    tracer, enough = Tracer(chosen, nudge=nudge), until_stepped(evidence, names)
    return evidence.rerun(enough=enough, contexts=tracer.contexts, may_raise=bool(chosen)), tracer


def _proven(evidence: Evidence, names: Sequence[str], needed: list[Candidate]) -> Cut | None:
    """A cut shown by leaving it out: all candidates at once, then halves, down to one; where several are needed, the
    one nearest to the loss. One by one where leaving all out is too much for the loop."""
    if len(needed) < 2 or not _without(evidence, names, needed):
        cuts = (_without(evidence, names, [c]) for c in needed[:MOST_TRIED])
        return next((cut for cut in cuts if cut), None)
    while len(needed) > 1:
        halves = needed[: len(needed) // 2], needed[len(needed) // 2 :]
        smaller = next((half for half in halves if _without(evidence, names, half)), None)
        if smaller is None:
            break
        needed = smaller
    for candidate in needed[:MOST_TRIED] if len(needed) > 1 else ():
        rest = [c for c in needed if c is not candidate]
        if rest and _without(evidence, names, rest):
            needed = rest
    return _without(evidence, names, needed)


def _without(evidence: Evidence, names: Sequence[str], left_out: list[Candidate]) -> Cut | None:
    """The first of these operations as the cut, if a gradient reaches one of the parameters with all left out."""
    seen = evidence.run()
    record, _ = _traced(evidence, names, left_out)
    passes = seen.autograd_passes()
    if seen.raised is not None and passes and not any(root.history for root in passes[-1].roots):
        through = record.autograd_passes()[len(passes) - 1 : len(passes)]  # the pass that torch refused
        names = [p.name for p in record.parameters if p.name in names and any(b.arrivals.get(p.index) for b in through)]
    if seen.raised is not None:
        accepted, before = (
            sum(all(r.history for r in b.roots) for b in run.autograd_passes()) for run in (record, seen)
        )
        if accepted <= before:
            return None  # torch refused a backward pass, and refuses it still
    peaks = arriving(record, names)
    if not peaks:
        return None
    fired = frozenset(p.name for p in record.parameters if p.name in set(names) and any(record.arrivals(p.index)))
    return Cut(left_out[0], max(peaks.values()), reached=frozenset(peaks), fired=fired, others=tuple(left_out[1:]))


def arriving(record: Record, names: Sequence[str]) -> dict[str, float]:
    """The largest gradient entry at each of the parameters that gets one that is not zero."""
    peaks = {p.name: max((a.incoming.peak for a in record.arrivals(p.index)), default=0.0) for p in record.parameters}
    largest = max((peak for peak in peaks.values() if math.isfinite(peak)), default=0.0)
    return {name: peaks[name] for name in names if name in peaks and not peaks[name] <= CANCELLATION * largest}


def graph_cuts(
    evidence: Evidence, left: list[str], shift: float, teachers: list[str], *, refused: bool
) -> Iterator[Finding]:
    """One finding for each operation that cuts; what one operation explains is not looked at again. ``shift`` is how
    far the loss moves with the parameters, ``teachers`` gets the paths of modules that give targets only, and
    ``refused`` says that torch refused the backward pass."""
    record = evidence.run()
    raised = record.raised.place if record.raised else ""
    while left:
        cut, _ = search(evidence, left, {"detach", "grad_off", "value", "custom"})
        facts: dict[str, Any] = {"passes": len(record.autograd_passes()), "shift": shift, "refused": refused}
        if cut is None:
            yield found("graph_cut", raised, left, "unexplained", explains=TRAINING, **facts)
            return
        explained = [n for n in left if not cut.reached or n in cut.reached | cut.fired]
        names, by = tuple(explained or left), cut.candidate
        # of a refused pass the parameters of other optimizers are not known to be cut off
        left = [n for n in left if explained and n not in explained and not refused]
        switched = by.kind == "grad_off"
        off = switched and cut.gradient is not None
        op = "no_grad" if switched else _WRITTEN.get(by.op, f"{by.op}()")
        facts |= {"op": op, "module": cut.module, "others": len(cut.others), "first": names[0]}
        facts |= {"gradient": cut.gradient, "moved": cut.moved}
        cause, at = "no_grad_forward" if off else "graph_cut", (refused and raised) or by.place
        if switched and not refused and (teacher := _teacher(evidence, names)):
            teachers.append(teacher)
            yield found(cause, at, names, "teacher", level="advice", teacher=teacher, **facts)
            continue
        uses = _used_twice(evidence, names, by) if by.kind == "detach" and not cut.others else None
        if uses is not None:
            line, other = uses
            yield found("graph_cut", at, names, "used twice", change=str(line), other=other, cut_at=by.place, **facts)
            continue
        lines = [behind_return(c.site) if c.op in ("argmin", "argmax") else str(c.place) for c in (by, *cut.others)]
        if off:  # what switches gradients off around the call, or around that of the loss
            lines = [without_gradients(line) or without_gradients(value(str(at))) or line for line in lines]
        facts["change"] = "\n".join(dict.fromkeys(lines))
        if by.kind == "detach" and cut.gradient is not None and (side := _other_side(evidence, names, cut)):
            repair = stopped_on(*side, op, by.place)
            yield found("graph_cut", at, names, "other side", repair=repair, **facts)
            continue
        form = "own function" if by.kind == "custom" else "left out" if cut.gradient is not None else ""
        yield found(cause, at, names, form, repair=_repair(by, op, off=off), **facts)


def steps_without_gradients(record: Record, never: Sequence[Parameter]) -> Iterator[Finding]:
    """What one run shows of optimizers all of whose parameters are among these, to which no gradient arrives.

    The loop makes a backward pass for each step, and no step uses what it brings: a fault. Where a step of another
    optimizer uses it, this one may wait for a loss of a later epoch, although its modules run with gradients on.
    """
    ledger, silent, by_hand = Ledger(record), {p.index for p in never}, record.moved_outside_steps()
    for optimizer in record.optimizers:
        mine = {i for i in optimizer.parameters if record.parameters[i].trainable}
        windows = [w for w in ledger.windows if w.optimizer == optimizer.index]
        grads = [grad for w in windows for read in w.step.reads for grad in read.grads.values()]
        called = [p for p in never if p.index in mine and p.calls_with_grad >= len(windows)]
        if len(windows) < LEAST_STEPS or not mine <= silent or not called or any(g is not None for g in grads):
            continue  # what is frozen, or not called so far, waits for its turn
        ends = sorted(w.step.at for w in ledger.windows)
        since = {at: before for before, at in itertools.pairwise([0, *ends])}
        own = [[p for p in ledger.passes if since[w.step.at] < p.at < w.step.at] for w in windows]
        passes = [p for each in own for p in each]
        # a scaler leaves out the step of what is not finite
        unused = all(own) and not any(p.used or by_hand & set(p.backward.arrivals) or not p.finite() for p in passes)
        earlier = [p for p in ledger.passes if p.at < windows[-1].step.at]
        before = own[0][-1] if unused else earlier[-1] if earlier else None
        if before is None:
            continue
        line, reached = str(before.backward.place), record.names(before.backward.arrivals)
        change = value(line) or line
        facts: dict[str, Any] = {"steps": len(windows), "kind": optimizer.kind, "passes": len(ledger.passes)}
        facts |= {"unused": line.partition("   ")[0] if unused else "", "others": some(reached, most=2)}
        facts |= {"shift": 0.0, "change": change, "level": "fault" if unused else "advice"}
        if ".detach()" in change:
            facts["repair"] = change.partition("   ")[2].replace(".detach()", "")
        yield found("graph_cut", windows[0].step, record.names(mine), "one run", **facts)


def _repair(by: Candidate, op: str, *, off: bool) -> str:
    code = by.place.code
    if ".sample(" in code:
        written = code.replace(".sample(", ".rsample(")
        return f"{written}\nrsample() has a gradient for its parameters, sample() has none"
    if by.kind == "grad_off" and "set_grad_enabled" in code:
        return (
            "let gradients be on in the training forward pass: make the condition true there, or leave the switch out"
        )
    if off:
        return "move the training forward pass out of torch.no_grad() / inference_mode()"
    if by.op == "detach" and re.search(r"-.*\)\.detach\(\)|\.detach\(\) *[-+]|[-+] *\w+\.detach\(\)", code):
        return "a straight-through step is x + (f(x) - x).detach(): only x, outside of detach(), carries the gradient"
    if by.op in ("item", "__float__", "tolist", "numpy", "__array__", "tensor", "as_tensor"):
        return f"leave {op} out here: compute with the tensor itself, and use {op} for logging only"
    if by.kind == "custom":
        return f"return a gradient for every input that needs one from {by.op}.backward()"
    if by.op in ATEN_COMPARISONS or by.op in ("argmax", "argmin", "round", "eq", "ne", "sign", "topk", "sort"):
        return f"{op} has no gradient: use a loss of the scores themselves (cross_entropy in place of accuracy)"
    if by.op == "detach" and ".detach()" in code:
        written = code.replace(".detach()", "")
        empty = re.fullmatch(r"([\w.]+) = \1", written)
        return (
            f"remove this line, or use {op} for logging only" if empty else f"{written}\nor use {op} for logging only"
        )
    return f"keep the tensor and its history on the loss path; use {op} for logging only"


class _Uses(WatchingMode):
    """The calls that take a result of the candidate, or a view of it: the position and the line of each."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__()
        self._candidate = candidate
        self._results: list[torch.Tensor] = []
        self.found: list[tuple[int, Place]] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = list(tensors_in(args, kwargs))
        out = passed_on(func, args, kwargs)
        place, site = here()
        made = (self._candidate.op, self._candidate.site) == (name, site)
        taken = [] if made else [t for t in given if any(t is r for r in self._results)]
        if taken:
            forward = self.watch.thread.forward
            self.found.append((self.watch.tick(), place if forward is None else forward.place))
        # of later calls views are followed: they hold the same values
        views = [t for t in tensors_in(out) if made or any(address(t) == address(v) for v in taken)]
        self._results = [*self._results, *views][-MOST_KEPT:]
        return out


def _used_twice(evidence: Evidence, names: Sequence[str], cut: Candidate) -> tuple[Place, Place] | None:
    """The line that uses a result of the cut for these parameters, where another backward pass is rightly made without
    its history, and the line of that pass: a generator's fakes are detached for the discriminator, and must be."""
    uses = _Uses(cut)
    record = evidence.rerun(enough=until_stepped(evidence, names), contexts=uses.contexts)
    wanted = {p.index for p in record.parameters if p.name in set(names)}
    holders = {o.index for o in record.optimizers if wanted & set(o.parameters)}
    mine: set[int] = set()  # passes before a step of these optimizers; and a last one that torch refused
    since: list[int] = []
    for event in record.events:
        if isinstance(event, Backward):
            since.append(event.at)
        elif isinstance(event, Step) and not event.nested:
            mine.update(since if event.optimizer in holders else ())
            since = []
    mine.update(since)
    used = [(place, next((b for b in record.of(Backward) if b.at > at), None)) for at, place in uses.found]
    wrong = next((place for place, b in used if b is not None and b.at in mine), None)
    other = next((b.place for _, b in used if b is not None and b.at not in mine and b.arrivals), None)
    return (wrong, other) if wrong is not None and other is not None else None


class _Stopped(Tracer):
    """Leaves operations out, and detaches what their results are compared with."""

    def __init__(self, left_out: Sequence[Candidate]) -> None:
        super().__init__(left_out)
        self._mine: list[torch.Tensor] = []
        self.met: list[tuple[str, Place]] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [t for t in tensors_in(args, kwargs) if t.requires_grad]
        mine = [t for t in given if any(t is kept for kept in self._mine)]
        others = [t for t in given if not any(t is m for m in mine)]
        # no parameter itself is the other side
        if mine and others and not any(t.is_leaf for t in others) and self._compares(name_of(func), [*mine, *others]):
            self.met.append((name_of(func), here()[0]))
            stopped = {id(t): t.detach() for t in others}
            args = tuple(stopped.get(id(a), a) for a in args)
            return func(*args, **{key: stopped.get(id(v), v) for key, v in kwargs.items()})
        out = super().call(name, func, args, kwargs)
        if mine and not others:
            self._keep(out)
        return out

    def _changed(self, *given: Any) -> Any:
        out = super()._changed(*given)
        self._keep(out)
        return out

    def _keep(self, out: Any) -> None:
        self._mine = [*self._mine, *tensors_in(out)][-MOST_KEPT:]

    def _compares(self, name: str, given: Sequence[torch.Tensor]) -> bool:
        """Whether a call compares by name, or multiplies vectors of length 1 outside of layers."""
        if name in _COMPARISONS or name in ("cosine_embedding_loss", "pairwise_distance"):
            return True
        if name not in MULTIPLICATIONS | (PRODUCTS - {"linear"}) or self.watch.inside_parameters():
            return False
        return all(_of_length_one(t) for t in given)


def _of_length_one(tensor: torch.Tensor) -> bool:
    """Whether the vectors along the last or the one before the last axis have length 1, but for rounding."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.numel():
        return False
    values, eps = tensor.detach().double(), torch.finfo(tensor.dtype).eps
    lengths = ((values.norm(dim=axis), 16 * eps * tensor.shape[axis] ** 0.5) for axis in (-1, -2))
    return any(bool(((length - 1).abs() <= rounding).all()) for length, rounding in lengths)


def _other_side(evidence: Evidence, names: Sequence[str], cut: Cut) -> tuple[str, Place] | None:
    """The operation and line of the first comparison whose other side is to take the stop-gradient of this one: SimSiam
    with the predictor's output detached, a student detached in place of its teacher.

    With the stop-gradient there, every parameter that lacked a gradient must get one, and every other keep its own: two
    towers that both must train (CLIP) lose one of them by it, and there the operation is left out.
    """
    stopped = _Stopped([cut.candidate, *cut.others])
    record = evidence.rerun(enough=until_stepped(evidence, names), contexts=stopped.contexts, may_raise=True)
    before, after = (
        {p.name for p in run.parameters if p.index in run.held and run.reached(p.index)}
        for run in (evidence.run(), record)
    )
    return stopped.met[0] if stopped.met and (before - set(names)) | cut.reached <= after else None


_OPERAND = r"[\w.]+(?:\([^()]*\)|\[[^\[\]]*\])?"
_SIDES = re.compile(rf"\((?:({_OPERAND})\.detach\(\), ({_OPERAND})|({_OPERAND}), ({_OPERAND})\.detach\(\))(?=[,)])")


def stopped_on(comparison: str, at: Place, op: str, cut_at: Place) -> str:
    """The line with the stop-gradient on the other side; in words where the line does not hold both sides."""
    written = cut_at.code
    if cut_at == at:
        written = _SIDES.sub(lambda m: f"({m[1]}, {m[2]}.detach()" if m[1] else f"({m[3]}.detach(), {m[4]}", written)
    if written != cut_at.code:
        return f"{written}\nthe gradient stops on the other side of {comparison}"
    return f"detach the other side of {comparison} ({at.file}:{at.line}), and leave this {op} out"


class _Meetings(WatchingMode):
    """Where what these parameters gave without a history meets what has one: as a target, or otherwise."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._results: list[torch.Tensor] = []
        self.as_target: list[bool] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        given = list(tensors_in(args, kwargs))
        mine = [t for t in given if any(t is r for r in self._results)]
        if mine and any(t.requires_grad for t in tensors_in(out)):
            # a comparison takes the side that is to be learned first, and its target second
            target = args[1] if len(args) > 1 else kwargs.get("target", kwargs.get("other"))
            self.as_target.append(name_of(func) in _COMPARISONS | SUBTRACTIONS and all(t is target for t in mine))
        elif mine or any(self._is_of_them(t) for t in given):
            results = [t for t in tensors_in(out) if not t.requires_grad]
            self._results = [*self._results, *results][-MOST_KEPT:]
        return out

    def _is_of_them(self, tensor: torch.Tensor) -> bool:
        index = self.watch.table.index(tensor)
        return index is not None and self.watch.table.entries[index].name in self._names


def _teacher(evidence: Evidence, names: Sequence[str]) -> str:
    """The path of the widest module that holds these parameters and none that a gradient reaches, if all that it gives
    is a target of what trains (the teacher of a distillation); "" otherwise."""
    record = evidence.run()
    reached = [p.name for p in record.parameters if record.reached(p.index)]
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    path = ".".join(same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, parts))
    prefix = ""
    # it may hold idle parameters: a bias before a batch norm, a pooler that is not used
    while path and not any(name.startswith(f"{path}.") for name in reached):
        prefix, path = path, path.rpartition(".")[0]
    if not prefix or not evidence.repeatable:
        return ""
    met = _Meetings(names)
    evidence.rerun(enough=until_stepped(evidence, names), contexts=met.contexts)
    return prefix if met.as_target and all(met.as_target) else ""
