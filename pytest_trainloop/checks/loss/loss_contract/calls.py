"""The calls of loss functions in a run, each judged once the gradients at its result and at its input are known.

A call is one of torch's loss functions, of an operation that losses are written with, or of a function in the table of
losses. ``takes`` says of each argument what it is to hold; ``rules`` judges by that.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.checks.loss.dead_values import never_read
from pytest_trainloop.checks.loss.loss_contract.call import (
    WAITING_STEPS,
    Embedded,
    LossCall,
    Step,
    both_grow,
    column_against_table,
)
from pytest_trainloop.checks.loss.loss_contract.causes import found
from pytest_trainloop.checks.loss.loss_contract.ends import Ends
from pytest_trainloop.checks.loss.loss_contract.rules import rules_of
from pytest_trainloop.checks.loss.loss_contract.shifts import Shifts
from pytest_trainloop.checks.loss.loss_contract.sides import NamedSides
from pytest_trainloop.core import members
from pytest_trainloop.core.whose import present
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.losses.table.lookup import OF_TORCH, may_be_known, of_frame
from pytest_trainloop.instruments.tracing.arguments import bound_arguments, named_arguments
from pytest_trainloop.instruments.tracing.tape import Listener, Tape
from pytest_trainloop.instruments.tracing.tape_queries import SCALES, SUMS, addends, last_layer
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import has_values, writes_in_place
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, LOSSES
from pytest_trainloop.runs.checkpoint_bypass import switched, without
from pytest_trainloop.runs.hooks import before_calls
from pytest_trainloop.runs.second_run import SecondRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import FrameType

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.instruments.tracing.tape import Call, Value
    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 256
"""Calls from one line that are judged."""

OPERATIONS: Mapping[str, Mapping[str, str]] = {
    "log_softmax": {"input": "class_logits"},
    "logsumexp": {"input": "class_logits"},
    "log_sigmoid": {"input": "logits"},
    "softplus": {"input": "scores_or_sums"},
    "log1p": {"input": "scores_or_sums"},
    "log": {"input": "probabilities"},
    "gather": {"input": "log_probabilities", "index": "index"},
    "product": {"input": "values", "target": "values"},
    "outer": {"input": "values", "target": "values"},
    "difference": {"input": "values", "target": "values"},
}
"""Operations that losses are written with. "product" is one of two tensors of one shape; "difference" and "outer" are
a difference and a product (or a quotient) in which both sides are broadcast."""
_ARITHMETIC = {"sub": "difference", "rsub": "difference", "__sub__": "difference", "mul": "outer", "div": "outer"}
_WATCHED = LOSSES | OPERATIONS.keys() | _ARITHMETIC.keys() | {"embedding", "backward"}
KEPT = DISTANCE_LOSSES | {"difference"}
"""What later calls of the step are compared with."""


@dataclass(slots=True)
class CallSite:
    """The calls of one function from one line whose scores come from one layer."""

    name: str
    layer: str | None
    place: str
    at: Site
    of_table: bool
    with_history: int = 0
    evaluated: int = 0
    """Calls with a history that were made while the layer was in evaluation mode."""
    judged: int = 0
    findings: dict[tuple[str, str], list[Finding]] = field(default_factory=lambda: defaultdict(list))
    every: set[tuple[str, str]] = field(default_factory=set)


class LossCalls(Listener):
    """The calls of a run that is made in its ``contexts``; it listens to a tape."""

    def __init__(self, padding: Padding | None = None, *, open_embeddings: bool = False) -> None:
        self._open = open_embeddings
        self._step = Step(padding)
        self.shifts, self.ends = Shifts(), Ends()
        self.tape = Tape(self, _WATCHED, may_be_known)
        self.sides = NamedSides(self.tape)
        self.sites: dict[tuple[str, Site, str | None], CallSite] = {}
        self.unread: list[str] = []
        self._detached: dict[tuple[str, str], int] = defaultdict(int)
        self._backwards = 0
        self._root: float | None = None
        self._waiting: deque[tuple[int, list[LossCall]]] = deque()
        self._versions: dict[int, tuple[int, int]] = {}
        self._record: Record | None = None
        self._own_data = False

    @classmethod
    def of(cls, evidence: Evidence) -> LossCalls:
        """The watched run made again, with every call of a loss function recorded."""
        return evidence.shared(SecondRun).heard(cls)

    @classmethod
    def listening(cls, evidence: Evidence) -> LossCalls:
        calls = cls(evidence.declared("padding"))
        calls._own_data = evidence.shared(makes_own_data)
        return calls

    @classmethod
    def with_open_embeddings(cls, evidence: Evidence) -> LossCalls:
        """The same run with a gradient at what embeddings give, frozen or not, and with plain calls for checkpoints."""
        calls = cls(open_embeddings=True)
        evidence.rerun(contexts=lambda watch: (*calls.contexts(watch), switched(without)), before_item=calls.take_batch)
        return calls

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        self._record = watch.record
        contexts = (self._recorded(), *self.tape.contexts(watch))
        return (*contexts, self._taking_arguments(watch)) if self._own_data else contexts

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.new_step()
            for _, waiting in self._waiting:
                waiting.clear()

    def take_batch(self, number: int, item: Any) -> None:
        if self._own_data:
            return
        self._step.rows, self._step.batch = nested.rows(item), item
        self.tape.take(number, item)
        self.sides.take()

    def _taking_arguments(self, watch: Watch) -> contextlib.AbstractContextManager[None]:
        """What a model is called with takes the place of the batch where the loop makes its own data."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            item = named_arguments(module, args, kwargs)
            self._step.rows, self._step.batch = nested.rows(item), item

        return before_calls(watch, enter)

    @property
    def record(self) -> Record:
        return present(self._record, "the record of the run")

    # What the tape reports

    def new_step(self) -> None:
        self._step.embedded.clear()
        self._step.calls.clear()

    def before(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.op == "backward":
            self._backpropagated(list(tensors_in(args[:1], kwargs.get("tensors", ()))))

    def raised(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        made = self._made(call, args, kwargs)
        if made is not None:
            made.error = error
            self._judge(made)

    def after(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if not isinstance(out, torch.Tensor):
            return None
        if call.op == "embedding":
            if self._open and torch.is_grad_enabled() and not out.requires_grad:
                out = out.detach().requires_grad_().clone()  # no leaf: the loop may write to it in place
            given = bound_arguments(F.embedding, args, kwargs)
            ids, pad = given.get("input"), given.get("padding_idx")
            if isinstance(ids, torch.Tensor) and ids.dim() in (1, 2):
                pad, table = (None if pad is None or pad < 0 else pad), given.get("weight")
                entries = len(table) if isinstance(table, torch.Tensor) else 0
                self._step.embedded.append(Embedded(ids.detach(), pad, out, call.module, entries))
            return out
        made = self._made(call, args, kwargs) if out.requires_grad else None
        if made is not None:
            made.out = out
            self._judge_after_backward(made)
        return None

    def began(self, frame: FrameType) -> LossCall | None:
        """A function in the table of losses begins, with its arguments as they are given."""
        known = of_frame(frame)
        if known is None:
            return None
        contract, given = known.contract, dict(known.given)
        for role, name in (("input", next(iter(contract.outputs), None)), ("target", contract.target)):
            if name is not None:
                given[role] = given.get(name)
        if isinstance(known.owner, torch.distributions.Distribution):
            given |= {f"parameter {n}": v for n, v in vars(known.owner).items() if isinstance(v, torch.Tensor)}
        if isinstance(contract.ignore_index, str):
            given["ignore_index"] = given.get(contract.ignore_index)
        elif contract.ignore_index is not None:
            given["ignore_index"] = contract.ignore_index
        made = self._loss_call(known.name, contract.arguments, given, *here(frame.f_back))
        made.known, made.class_dim = known, contract.class_dim
        if known.entry.weights and isinstance(known.owner, nn.Module):
            made.unstepped = tuple(self._unstepped(known.owner))
        return made

    def ended(self, made: LossCall, result: torch.Tensor) -> None:
        made.out = result
        self._step.calls.append(made)
        self._judge_after_backward(made)

    # Calls

    def _made(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall | None:
        """The call, if it can be judged."""
        name = call.func.__name__
        if name in LOSSES or name == "embedding":
            if getattr(F, name, None) is not call.func:
                return None
            given = bound_arguments(call.func, args, kwargs)
            takes = OF_TORCH[name].contracts[0].arguments if name in OF_TORCH else {}
        else:
            name, given = _operation(call, name, args, kwargs)
            takes = OPERATIONS.get(name, {})
            if name == "difference" and any(one[1] is not None for one in self.tape.running):
                return None  # of what the table has a contract for
        if not given:
            return None
        made = self._loss_call(name, takes, given, *here())
        made.module = call.module
        dim = given.get("dim")
        if name in OPERATIONS:
            made.class_dim = dim if isinstance(dim, int) else -1
        elif isinstance(scores := given.get("input"), torch.Tensor):
            made.class_dim = 1 if scores.dim() > 1 else 0
        return made

    def _loss_call(self, name: str, takes: Any, given: dict[str, Any], place: Place, site: Site) -> LossCall:
        values = {key: self.tape.of(v) for key, v in given.items() if isinstance(v, torch.Tensor)}
        made = LossCall(
            name=name, takes=takes, given=given, values=values, place=place, site=site, step=self._step,
            module=self.tape.watch.module_path(), embedded=tuple(self._step.embedded), steps=self.record.steps,
        )  # fmt: skip
        layer, _ = last_layer(values.get("input"))
        if layer is not None and layer.call is not None and any(p.parameter for p in layer.parents):
            made.layer, made.evaluates = layer.call.module, layer.call.evaluates
        return made

    def _unstepped(self, owner: nn.Module) -> Iterator[str]:
        """Weights of a criterion that no step has changed since it was first called, three steps ago at least."""
        steps = self.record.steps
        for name, weight in members.named_parameters(owner):
            version, since = self._versions.setdefault(id(weight), (writes_in_place(weight), steps))
            if writes_in_place(weight) == version and steps - since >= WAITING_STEPS and weight.requires_grad:
                yield name

    def _site_of(self, call: LossCall) -> CallSite:
        site = CallSite(call.name, call.layer, str(call.place), call.site, call.known is not None)
        return self.sites.setdefault((call.name, call.site, call.layer), site)

    def _backpropagated(self, roots: list[torch.Tensor]) -> None:
        single = [r for r in roots if r.numel() == 1]
        plain = len(single) == len(roots) and all(map(has_values, roots))
        self._root = sum(float(r.detach()) for r in single) if plain else None
        self._backwards += 1
        for where in {where for root in single for where in _without_gradient(self.tape.of(root))}:
            self._detached[where] += 1

    def _judge_after_backward(self, call: LossCall) -> None:
        if not call.out.requires_grad:
            return
        if call.name in KEPT:
            self._step.calls.append(call)
        call.made = self.tape.of(call.out) if call.known is not None else None
        site = self._site_of(call)
        site.with_history, site.evaluated = site.with_history + 1, site.evaluated + call.evaluates
        given = next((v for v in call.given.values() if isinstance(v, torch.Tensor) and v.requires_grad), None)

        # A graph holds its hooks, and these would hold the call's tensors, and with them the graph: until it is judged,
        # since further backward passes, of the loop or of a rule, call the hooks again; or until it is old.
        waiting = [call]
        self._waiting.append((self.record.steps, waiting))
        while self._waiting[0][0] < self.record.steps - WAITING_STEPS:
            self._waiting.popleft()[1].clear()

        def at_input(gradient: torch.Tensor | None) -> None:
            if waiting and waiting[0].weights is not None and self.tape.is_on:
                call = waiting.pop()
                call.arrived, call.root = gradient, self._root
                with self.tape.watch.suspended(), torch.no_grad():
                    self._judge(call)

        def at_result(gradient: torch.Tensor | None) -> None:
            if waiting:
                waiting[0].weights = gradient
            if given is None:
                at_input(None)

        on_gradient(call.out, at_result)
        if given is not None:
            on_gradient(given, at_input)

    def _judge(self, call: LossCall) -> None:
        site = self._site_of(call)
        tensors = [v for v in call.given.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        if site.judged >= MOST or any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors):
            return
        call.number, site.judged = site.judged, site.judged + 1
        for rule in (self.shifts.compare, self.ends.compare, *rules_of(call)):
            try:
                for finding in rule(call):
                    site.findings[finding.cause, finding.culprits[0]].append(finding)
            except Exception as error:  # torch may refuse what is computed of tensors of the project's
                if not self.record.note_mistake(error):
                    self.unread.append(f"{call.name} at {call.place}: {type(error).__name__}: {error}")
        site.every |= call.every

    # What is said in the end

    def findings(self) -> Iterator[Finding]:
        """What is wrong with the calls, with the number of calls that show it; those of the table first."""
        for site in sorted(self.sites.values(), key=lambda site: not site.of_table):
            for key, seen in site.findings.items():
                if key in site.every and len(seen) < site.judged:
                    continue
                intended = self._is_contrast if seen[0].level == "advice" else self._is_meant
                if key[0] != "sign_flipped" or not intended(site):
                    yield _counted(seen[0], len(seen), site.judged)
        yield from self._without_gradient()

    def _is_meant(self, site: CallSite) -> bool:
        """Whether a loss may be maximised on purpose: the optimizer maximises, another loss is backpropagated, or no
        optimizer holds the layer that gave the scores (an attack on the inputs)."""
        if any(o.maximizes for o in self.record.optimizers):
            return True
        if site.of_table and site.layer is None:
            return False
        others = any(s is not site and s.name in LOSSES and s.judged and not site.of_table for s in self.sites.values())
        return others or not self._held_below(site.layer)

    def _is_contrast(self, site: CallSite) -> bool:
        """Whether the same loss of the same layer is minimised elsewhere: an energy-based critic lowers the error of
        real examples and raises that of fakes."""
        others = (s for s in self.sites.values() if s is not site and (s.name, s.layer) == (site.name, site.layer))
        return site.layer is not None and any(
            s.judged and not any(cause == "sign_flipped" for cause, _ in s.findings) for s in others
        )

    def _held_below(self, layer: str | None) -> list[int]:
        """The parameters of a layer that an optimizer holds."""
        names = [(i, self.record.parameters[i].name) for i in self.record.held] if layer is not None else []
        return [i for i, name in names if (name.startswith(f"{layer}.") if layer else "." not in name)]

    def _without_gradient(self) -> Iterator[Finding]:
        """Losses that were computed with a history and are not backpropagated, or only with their value."""
        detached = [where for where, times in self._detached.items() if times == self._backwards]
        for name, where in detached:
            yield found("part_detached", where, (name,), passes=self._backwards)
        losses = [site for site in self.sites.values() if site.name in LOSSES]
        trains = any(site.judged and not site.evaluated for site in losses)
        for site in losses if any(site.judged for site in losses) else ():
            if trains and site.evaluated == site.with_history:
                continue  # a validation without no_grad(), between steps in training mode
            if site.with_history > 2 and not site.judged and (site.name, site.place) not in detached:
                held = self._held_below(site.layer)
                only = site.layer if held and not any(any(self.record.arrivals(i)) for i in held) else None
                lost = never_read(site.at)
                variant = "layer" if only else "lost" if lost else ""
                facts = {"call": site.name, "layer": only, "lost": lost, "calls": site.with_history}
                level = "fault" if variant else "advice"
                yield found("part_left_out", site.place, (only or site.name,), variant, level=level, **facts)


def _without_gradient(root: Value) -> set[tuple[str, str]]:
    """Losses whose value is added to what is backpropagated and whose gradient is not, while that of others is."""
    added = [(value, alive) for value, alive in addends(root, SUMS | SCALES) if value.op in LOSSES]
    live = {id(value) for value, alive in added if alive}
    return {(v.op, str(v.call.place)) for v, _ in added if live and id(v) not in live and v.call is not None}


def _operation(call: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """An operation that losses are written with, under the name by which it is judged, and its arguments."""
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, torch.Tensor):
        return name, {}
    if name in _ARITHMETIC:
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if not isinstance(other, torch.Tensor):
            return name, {}
        sides = {"input": given, "target": other}
        if name == "mul" and given.shape == other.shape and given.dim() > 1:
            return "product", sides
        if _ARITHMETIC[name] == "difference" and column_against_table(given, other):
            column = given if given.requires_grad else other
            return "difference", {"input": column, "target": other if column is given else given}
        return (_ARITHMETIC[name], sides) if both_grow(given.shape, other.shape) else (name, {})
    dim = call.argument("dim", 1)
    if isinstance(dim, int):
        dim %= max(given.dim(), 1)
    if name == "gather":
        return name, {"input": given, "dim": dim, "index": args[2] if len(args) > 2 else kwargs.get("index")}
    if name in OPERATIONS:
        return name, {"input": given, "dim": given.dim() - 1 if name in ("log_softmax", "logsumexp") else dim}
    return name, {}


def _counted(finding: Finding, times: int, calls: int) -> Finding:
    if finding.cause == "all_ignored" and times == calls > 1:
        # a count of at least 1 would hide that nothing is ever learned
        finding = replace(finding, repair="look why no target of any batch counts: all labels are masked, or cut off")
    often = f"; in {times} of {calls} calls" if calls > 1 else ""
    return replace(finding, measured=f"{finding.measured}{often}".removeprefix("; "))
