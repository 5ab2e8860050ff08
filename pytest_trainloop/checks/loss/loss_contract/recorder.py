"""The calls of loss functions in a run, each judged once the gradient at it is known.

``LossCallRecorder.call`` sees every call of torch, and makes a ``Call`` of one that is a loss or an ``operation`` that
losses are written with. A ``Call`` waits for the backward pass; then ``JUDGES`` has what judges a function of its name.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import members, nested
from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.batches.padding import Ids
from pytest_trainloop.checks.loss.dead_values import never_read
from pytest_trainloop.checks.loss.loss_contract import loss_terms, refused_calls
from pytest_trainloop.checks.loss.loss_contract.by_contract import by_contract
from pytest_trainloop.checks.loss.loss_contract.call import Call, Compared, PairTable
from pytest_trainloop.checks.loss.loss_contract.contracts import JUDGES
from pytest_trainloop.checks.loss.loss_contract.label_shifts import LabelShifts
from pytest_trainloop.checks.loss.loss_contract.named_sides import NamedSides
from pytest_trainloop.checks.loss.loss_contract.operations import OPERATIONS, operation
from pytest_trainloop.checks.loss.loss_contract.running_calls import RunningCalls
from pytest_trainloop.checks.loss.loss_contract.tokens import Embedded, Tokens
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import has_values, writes_in_place
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, LOSSES
from pytest_trainloop.runs.checkpoint_bypass import switched, without
from pytest_trainloop.runs.hooks import before_calls
from pytest_trainloop.tracing.arguments import bound_arguments, named_arguments
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import Lineage, Node, name_of, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from pytest_trainloop.checks.loss.loss_contract.call import Judge, Judgement
    from pytest_trainloop.finding import Finding
    from pytest_trainloop.loop import Padding
    from pytest_trainloop.losses.table.lookup import Known
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 256
"""Calls from one line that are judged."""

WAITING_STEPS = 3
"""Optimizer steps for which a call waits for its backward pass."""


@dataclass(slots=True)
class CallSite:
    """The calls from one line whose scores come from one layer."""

    name: str
    layer: str | None = None
    of_table: bool = False
    """Whether the table of losses has the function: it says more than the functions of torch that it calls."""
    where: str = ""
    with_history: int = 0
    """Calls whose result has a history."""
    evaluated: int = 0
    """Those of them that were made while the layer was in evaluation mode."""
    judged: int = 0
    """Calls whose result a gradient reached, or that raised."""
    judgements: dict[tuple[str, str], list[Judgement]] = field(default_factory=lambda: defaultdict(list))
    """What is wrong with them, by cause and culprit."""


class LossCallRecorder(WatchingMode):
    """Records the calls of loss functions in a run that is made in its ``contexts``; ``take_batch`` gets every batch.

    ``sites`` holds what was recorded, ``unread`` says which calls could not be judged, ``called`` names the loss
    functions that were called.
    """

    def __init__(self, padding: Padding | None = None, *, open_embeddings: bool = False) -> None:
        super().__init__()
        self._open_embeddings = open_embeddings
        self.shifts = LabelShifts()
        self.sides = NamedSides()
        self._lineage = Lineage()
        self._steps = -1
        self._tokens = Tokens(padding)
        self._rows = 0
        self.sites: dict[tuple[str, Site, str | None], CallSite] = {}
        self._root: float | None = None
        self._detached: dict[tuple[str, str], int] = {}
        self._backwards = 0
        self._record: Record | None = None
        self.unread: list[str] = []
        self.called: dict[str, None] = {}
        self._waiting: deque[tuple[int, list[Call]]] = deque()
        self._running = RunningCalls(self._began, self._ended)
        self._compared: list[Compared] = []
        self._of_owner: dict[int, list[Call]] = {}
        self._log_probs: list[Node] = []
        self._with_itself: set[int] = set()
        self._pair_tables: list[PairTable] = []
        self._versions: dict[int, tuple[int, int]] = {}

    @classmethod
    def of(cls, evidence: Evidence) -> LossCallRecorder:
        """The watched run made again, with every call of a loss function recorded."""
        found = cls(evidence.declared("padding"))
        if evidence.shared(makes_own_data):
            evidence.rerun(contexts=lambda watch: (*found.contexts(watch), found.taking_arguments(watch)))
        else:
            contexts = lambda watch: (*found.contexts(watch), *found.sides.contexts(watch))  # noqa: E731
            evidence.rerun(contexts=contexts, before_item=found.take_batch)
        return found

    @classmethod
    def with_open_embeddings(cls, evidence: Evidence) -> LossCallRecorder:
        """The same run with a gradient at what embeddings give, frozen or not, and with plain calls for checkpoints."""
        found = cls(open_embeddings=True)
        evidence.rerun(contexts=lambda watch: (*found.contexts(watch), switched(without)), before_item=found.take_batch)
        return found

    def take_batch(self, _number: int, item: Any) -> None:
        self._rows = nested.rows(item)
        self._tokens.batch = item
        self.sides.take(item)

    def taking_arguments(self, watch: Watch) -> contextlib.AbstractContextManager[None]:
        """What a model is called with stands for the batch where the loop makes its own data."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.take_batch(0, named_arguments(module, args, kwargs))

        return before_calls(watch, enter)

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self.watching(watch), self.on_while_full(watch))

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        self._record = watch.record
        try:
            with super().watching(watch):
                yield
        finally:
            self._forget()
            for _, waiting in self._waiting:
                waiting.clear()

    def findings(self) -> Iterator[Finding]:
        """What is wrong with the calls, with the number of calls that show it."""
        for site in sorted(self.sites.values(), key=lambda site: not site.of_table):
            for judgements in site.judgements.values():
                first = judgements[0]
                if first.in_every_call and len(judgements) < site.judged:
                    continue
                if first.finding.cause != "sign_flipped" or self._is_mistake(site, first.finding):
                    yield _counted(first.finding, len(judgements), site.judged)
        yield from self._without_gradient()

    def _is_mistake(self, site: CallSite, finding: Finding) -> bool:
        """Whether a loss is maximised by mistake: no other loss is backpropagated, and the layers that gave the scores
        are trained. Advice needs no such proof."""
        if finding.level == "advice":
            return not self._is_contrast(site)
        if site.of_table and site.layer is None:
            return self._record is None or not any(o.maximizes for o in self._record.optimizers)
        others = [
            s for s in self.sites.values() if s is not site and s.name in LOSSES and s.judged and not site.of_table
        ]
        return self._record is not None and not others and not loss_terms.is_meant(self._record, site.layer)

    def _is_contrast(self, site: CallSite) -> bool:
        """Whether the same loss of the same layer is minimised elsewhere: an energy-based critic lowers the error of
        real examples and raises that of fakes."""
        alike = (s for s in self.sites.values() if s is not site and (s.name, s.layer) == (site.name, site.layer))
        return site.layer is not None and any(
            s.judged and not any(cause == "sign_flipped" for cause, _ in s.judgements) for s in alike
        )

    def _without_gradient(self) -> Iterator[Finding]:
        """Losses that were computed with a history and are not backpropagated, or only with their value."""
        detached = [where for where, times in self._detached.items() if times == self._backwards]
        for where in detached:
            yield _counted(loss_terms.detached(*where), self._backwards, self._backwards)
        losses = [(at, site) for (name, at, _), site in self.sites.items() if name in LOSSES]
        used = any(site.judged for _, site in losses)
        trains = any(site.judged and not site.evaluated for _, site in losses)
        for at, site in losses:
            if trains and site.evaluated == site.with_history:
                continue  # a validation without no_grad(), between steps in training mode
            if used and site.with_history > 2 and not site.judged and (site.name, site.where) not in detached:
                never = self._record is not None and loss_terms.never_trained(self._record, site.layer)
                finding = loss_terms.left_out(site.name, site.where, site.layer if never else None, never_read(at))
                yield _counted(finding, site.with_history, site.with_history)

    def active(self) -> bool:
        """While the run is watched in full: these steps are enough to judge by."""
        return self.watch.full and super().active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, name = self.watch, name_of(func)
        if watch.record.steps != self._steps:
            self._steps = watch.record.steps
            self._forget()
        with watch.suspended():
            self._running.before()
        if not watched(name):
            return passed_on(func, args, kwargs)
        with watch.suspended():
            if name == "backward":
                self._backpropagated(args, kwargs)
            parents = self._lineage.before(name, args, kwargs)
            call = self._call(watch, func, name, args, kwargs)
        try:
            out = passed_on(func, args, kwargs)
        except Exception as error:
            if call is not None:
                with watch.suspended():
                    self._judge(call, functools.partial(refused_calls.raised, error=error))
            raise
        with watch.suspended():
            self._lineage.note(watch, func, name, args, kwargs, parents, out)
            self._running.after(out)
            if name == "embedding" and isinstance(out, torch.Tensor):
                if self._open_embeddings and torch.is_grad_enabled() and not out.requires_grad:
                    out = out.detach().requires_grad_().clone()  # no leaf: the loop may write to it in place
                self._embedded(watch, args, kwargs, out)
            elif call is not None and isinstance(out, torch.Tensor):
                call.out = out
                self._judge_after_backward(watch, call)
        return out

    def _forget(self) -> None:
        self._lineage.forget()
        self._tokens.embedded.clear()
        self._running.forget()
        self._compared, self._of_owner, self._log_probs, self._with_itself = [], {}, [], set()
        self._pair_tables.clear()

    def _backpropagated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        roots = list(tensors_in(args[:1], kwargs.get("tensors", ())))
        single = [r for r in roots if r.numel() == 1]
        self._root = (
            sum(float(r.detach()) for r in single)
            if len(single) == len(roots) and all(map(has_values, roots))
            else None
        )
        self._backwards += 1
        for node in {id(n): n for r in single for n in loss_terms.without_gradient(self._lineage.of(r))}.values():
            where = node.op, str(node.place)
            self._detached[where] = self._detached.get(where, 0) + 1

    def _embedded(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        given = bound_arguments(F.embedding, args, kwargs)
        ids, pad = given.get("input"), given.get("padding_idx")
        if isinstance(ids, torch.Tensor) and ids.dim() in (1, 2):
            known = Ids(ids.detach(), None if pad is None or pad < 0 else pad)
            table = given.get("weight")
            entries = len(table) if isinstance(table, torch.Tensor) else 0
            self._tokens.embedded.append(Embedded(known, out, watch.module_path(), entries))

    def _call(
        self, watch: Watch, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """The call, if it can be judged."""
        if name in LOSSES or name == "embedding":
            if getattr(F, name, None) is not func:
                return None
            given = bound_arguments(func, args, kwargs)
        elif name in OPERATIONS:
            name, given = operation(name, args, kwargs)
            if name == "difference" and self._running.current is not None:
                return None  # of what the table has a contract for
        else:
            return None
        if not given:
            return None
        place, site = here()
        made = Call(
            name=name, given=given, place=place, site=site, out=torch.empty(0),
            module=watch.module_path(), tokens=self._tokens, embedded=tuple(self._tokens.embedded), rows=self._rows,
            log_probs=self._log_probs, with_itself=self._with_itself,
            pair_tables=self._pair_tables, steps=self._steps,
        )  # fmt: skip
        sides = given.get("input"), given.get("target")
        if name == "difference" and all(isinstance(s, torch.Tensor) and s.requires_grad for s in sides):
            self._with_itself.update(map(id, sides))
        made.nodes = {key: self._lineage.of(value) for key, value in given.items() if isinstance(value, torch.Tensor)}
        return made

    def _judge_after_backward(self, watch: Watch, call: Call) -> None:
        """Judge the call once the gradients at its result and at its input are known."""
        if call.name in LOSSES:
            self.called[call.name] = None
        if not call.out.requires_grad or not _judges_of(call):
            return
        if call.name in DISTANCE_LOSSES:
            self._remember(call)
        call.layer = loss_terms.layer_of(call)
        site = self._site_of(call)
        site.with_history, site.where = site.with_history + 1, str(call.place)
        site.evaluated += any(p == call.layer and not m.training for p, m in watch.table.named_modules())
        given = next((v for v in call.given.values() if isinstance(v, torch.Tensor) and v.requires_grad), None)
        by_result = given is None

        # A graph holds its hooks, and these would hold the call's tensors, and with them the graph: until it is judged,
        # since further backward passes, of the loop or of a judge, call the hooks again; or until it is old.
        waiting = [call]
        self._waiting.append((watch.record.steps, waiting))
        while self._waiting[0][0] < watch.record.steps - WAITING_STEPS:
            self._waiting.popleft()[1].clear()

        def at_input(gradient: torch.Tensor | None) -> None:
            if waiting and waiting[0].weights is not None and self._watch is not None:
                call = waiting.pop()
                with watch.suspended(), torch.no_grad():
                    call.arrived, call.root = gradient, self._root
                    self._judge(call)

        def at_result(gradient: torch.Tensor | None) -> None:
            if waiting:
                waiting[0].weights = gradient
            if by_result:
                at_input(None)

        on_gradient(call.out, at_result)
        if given is not None:
            on_gradient(given, at_input)

    def _began(self, known: Known, frame: FrameType) -> Call:
        """A call of a function in the table that begins, with its arguments as they are given."""
        place, site = here(frame.f_back)
        given = dict(known.given)
        if known.contract.outputs:
            given["input"] = given.get(known.contract.outputs[0])
        if known.contract.target is not None:
            given["target"] = given.get(known.contract.target)
        own = vars(known.owner) if isinstance(known.owner, torch.distributions.Distribution) else {}
        given |= {f"parameter {name}": value for name, value in own.items() if isinstance(value, torch.Tensor)}
        made = Call(
            name=known.name, given=given, place=place, site=site, out=torch.empty(0), module=self.watch.module_path(),
            tokens=self._tokens, embedded=tuple(self._tokens.embedded), rows=self._rows, known=known,
            compared=self._compared, beside=self._of_owner.setdefault(id(known.owner), []) if own else [],
            unstepped=self._unstepped(known),
        )  # fmt: skip
        made.beside.append(made)
        made.nodes = {key: self._lineage.of(value) for key, value in given.items() if isinstance(value, torch.Tensor)}
        return made

    def _unstepped(self, known: Known) -> tuple[str, ...]:
        """Weights of a criterion that require gradients, and that no step has changed since it was first called."""
        if not known.entry.weights or not isinstance(known.owner, nn.Module):
            return ()
        steps = self.watch.record.steps
        names = []
        for name, weight in members.named_parameters(known.owner):
            version, since = self._versions.setdefault(id(weight), (writes_in_place(weight), steps))
            if writes_in_place(weight) == version and steps - since >= WAITING_STEPS and weight.requires_grad:
                names.append(name)
        return tuple(names)

    def _ended(self, call: Call) -> None:
        if call.name.endswith(".log_prob"):
            self._log_probs.append(self._lineage.of(call.out))
        self._judge_after_backward(self.watch, call)

    def _remember(self, call: Call) -> None:
        """What a distance compares that may be boxes, for calls that take boxes."""
        given, target = call.tensor("input"), call.tensor("target")
        if given is None or target is None or given.shape != target.shape or len(self._compared) >= MOST:
            return
        if given.shape[-1:] == (4,):
            self._compared.append(Compared(id(call.given["input"]), target, call.place))

    def _site_of(self, call: Call) -> CallSite:
        made = CallSite(call.name, layer=call.layer, of_table=call.known is not None)
        return self.sites.setdefault((call.name, call.site, call.layer), made)

    def _judge(self, call: Call, only: Judge | None = None) -> None:
        site = self._site_of(call)
        if site.judged >= MOST or _has_nan(call):
            return
        call.number = site.judged
        site.judged += 1
        for judge in (self._compare_labels, *_judges_of(call)) if only is None else (only,):
            try:
                for judgement in judge(call):
                    site.judgements[judgement.finding.cause, judgement.finding.culprits[0]].append(judgement)
            except Exception as error:  # torch may refuse what is computed of tensors of the project's
                if not self.watch.record.note_mistake(error):
                    self.unread.append(f"{call.name} at {call.place}: {type(error).__name__}: {error}")

    def _compare_labels(self, call: Call) -> Iterator[Judgement]:
        """Nothing yet: labels are collected over all calls."""
        if call.name in ("cross_entropy", "nll_loss", "gather"):
            self.shifts.compare(call)
        yield from ()


def _judges_of(call: Call) -> list[Judge]:
    return [by_contract] if call.known is not None else JUDGES.get(call.name, [])


def _counted(finding: Finding, times: int, calls: int) -> Finding:
    if finding.cause == "all_ignored" and times == calls > 1:
        # a count of at least 1 would hide that nothing is ever learned
        finding = replace(finding, repair="look why no target of any batch counts: all labels are masked, or cut off")
    often = f"; in {times} of {calls} calls" if calls > 1 else ""
    return replace(finding, measured=f"{finding.measured}{often}".removeprefix("; "))


def _has_nan(call: Call) -> bool:
    """Whether an output of the model is NaN: such values cannot be judged."""
    tensors = (v for v in call.given.values() if isinstance(v, torch.Tensor) and v.requires_grad)
    return any(v.is_floating_point() and bool(v.isnan().any()) for v in tensors)
