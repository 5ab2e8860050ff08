"""The calls of loss functions in a run, each judged once its part in what is backpropagated is known."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop import nested
from pytest_trainloop.batches.padding import Ids
from pytest_trainloop.checks.loss.loss_contract import broadcasting, loss_terms, refused_calls, token_labels
from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call
from pytest_trainloop.checks.loss.loss_contract.contracts import BY_HAND, READERS
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import LOSSES
from pytest_trainloop.tracing.arguments import bound_arguments
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import Lineage, name_of, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.loop import Padding
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 256
"""Calls of one place that are judged."""


@dataclass(slots=True)
class Place:
    """What was seen at one call site: how many calls with a history were made of scores of one layer, how many of
    them were judged, and what they broke."""

    name: str
    made: int = 0
    calls: int = 0
    layer: str | None = None
    where: str = ""
    breaches: dict[tuple[str, str], list[Breach]] = field(default_factory=lambda: defaultdict(list))

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.where


class LossCallRecorder(WatchingMode):
    """To be used by ``contexts`` of a run; ``handed`` is told of every batch. ``places`` is what was seen, ``unread``
    what could not be judged, ``seen`` names the loss functions that were called."""

    def __init__(self, padding: Padding | None = None) -> None:
        super().__init__()
        self._lineage = Lineage()
        self._steps = -1
        self._tokens = token_labels.Tokens(padding)
        self._rows = 0
        self.places: dict[tuple[str, Site, str | None], Place] = {}
        self._root: float | None = None
        self._added: dict[tuple[str, str], int] = {}
        self._backwards = 0
        self._record: Record | None = None
        self.unread: list[str] = []
        self.seen: dict[str, None] = {}

    @classmethod
    def of(cls, evidence: Evidence) -> LossCallRecorder:
        """The watched run made once more, with every call of a loss function looked at."""
        seen = evidence.run()
        found = cls(evidence.declared("padding"))
        record = evidence.rerun(contexts=found.contexts, before_item=found.handed)
        if record.raised is not None and seen.raised is None:
            found.unread.append(f"fit raised {record.raised.summary} only while they were looked at")
        return found

    def handed(self, _number: int, item: Any) -> None:
        self._rows = nested.rows(item)
        self._tokens.batch = item

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        self._record = watch.record
        try:
            with super().watching(watch):
                yield
        finally:
            self._forget()

    def breaches(self) -> Iterator[tuple[Breach, int, int]]:
        """What was broken, in how many of how many calls of its place."""
        for place in self.places.values():
            for found in place.breaches.values():
                everywhere = not found[0].always or len(found) == place.calls
                if everywhere and (found[0].cause != "sign_flipped" or self._is_turned(place, found[0])):
                    yield found[0], len(found), place.calls
        yield from self._apart()

    def _is_turned(self, place: Place, breach: Breach) -> bool:
        """Whether a loss is maximised by mistake, as far as the rest of the run tells: nothing else of a loss goes into
        what is backpropagated, and the layers that gave the scores are trained."""
        if breach.level == "advice":
            return True
        others = [p for p in self.places.values() if p is not place and p.name in LOSSES and p.calls]
        return self._record is not None and not others and not loss_terms.is_meant(self._record, place.layer)

    def _apart(self) -> Iterator[tuple[Breach, int, int]]:
        """Losses that were computed with a history and go into nothing, or with their value only."""
        added = [where for where, times in self._added.items() if times == self._backwards]
        for where in added:
            yield loss_terms.detached(*where), self._backwards, self._backwards
        used = any(p.calls for p in self.places.values() if p.name in LOSSES)
        for place in self.places.values():
            if place.name in LOSSES and used and place.made > 2 and not place.calls and place.key not in added:
                never = self._record is not None and loss_terms.never_trained(self._record, place.layer)
                yield (
                    loss_terms.left_out(place.name, place.where, place.layer if never else None),
                    place.made,
                    place.made,
                )

    def active(self) -> bool:
        """While the run is watched in full: these steps are enough to judge by."""
        return self.watch.full and super().active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, name = self.watch, name_of(func)
        if not watched(name):
            return func(*args, **kwargs)
        if watch.record.steps != self._steps:
            self._steps = watch.record.steps
            self._forget()
        with watch.quietly():
            if name == "backward":
                self._backpropagated(args, kwargs)
            parents = self._lineage.before(name, args, kwargs)
            call = self._call(watch, func, name, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if call is not None:
                with watch.quietly():
                    self._judge(call, functools.partial(refused_calls.refused, error=error))
            raise
        with watch.quietly():
            self._lineage.note(watch, func, name, args, kwargs, parents, out)
            if name == "embedding" and isinstance(out, torch.Tensor):
                self._looked_up(args, kwargs, out)
            elif call is not None and isinstance(out, torch.Tensor):
                call.out = out
                self._await(watch, call)
        return out

    def _forget(self) -> None:
        self._lineage.forget()
        self._tokens.embedded.clear()

    def _backpropagated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        roots = list(tensors_in(args[:1], kwargs.get("tensors", ())))
        single = [r for r in roots if r.numel() == 1]
        self._root = sum(float(r.detach()) for r in single) if len(single) == len(roots) else None
        self._backwards += 1
        for node in {id(n): n for r in single for n in loss_terms.without_gradient(self._lineage.of(r))}.values():
            where = node.op, str(node.place)
            self._added[where] = self._added.get(where, 0) + 1

    def _looked_up(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        given = bound_arguments(F.embedding, args, kwargs)
        ids, pad = given.get("input"), given.get("padding_idx")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            self._tokens.embedded.append((Ids(ids.detach(), None if pad is None or pad < 0 else pad), out))

    def _call(
        self, watch: Watch, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """The call, if it is one to be judged."""
        if name in LOSSES or name == "embedding":
            if getattr(F, name, None) is not func:
                return None
            given = bound_arguments(func, args, kwargs)
        elif name in BY_HAND:
            name, given = _by_hand(name, args, kwargs)
        else:
            return None
        if not given:
            return None
        place, site = here(3)
        made = Call(
            name=name, given=given, place=place, site=site, out=torch.empty(0),
            module=watch.module_path(), tokens=self._tokens, rows=self._rows,
        )  # fmt: skip
        made.nodes = {key: self._lineage.of(value) for key, value in given.items() if isinstance(value, torch.Tensor)}
        return made

    def _await(self, watch: Watch, call: Call) -> None:
        """Judge the call once gradients have come in at what it gave and at what it was given."""
        if call.name in LOSSES:
            self.seen[call.name] = None
        if not call.out.requires_grad or call.name not in READERS:
            return
        call.layer = loss_terms.layer_of(call)
        place = self._place(call)
        place.made, place.where = place.made + 1, str(call.place)
        given = [v for v in call.given.values() if isinstance(v, torch.Tensor) and v.requires_grad]

        waiting = [True]  # a backward pass of ours, or a second one of the loop's, comes here again

        def judged(gradient: torch.Tensor | None) -> None:
            if waiting and call.weights is not None and self._watch is not None:
                waiting.clear()
                with watch.quietly(), torch.no_grad():
                    call.arrived, call.root = gradient, self._root
                    self._judge(call)

        def came(gradient: torch.Tensor | None) -> None:
            call.weights = gradient if waiting else call.weights
            if not given:
                judged(None)

        call.out.register_hook(came)  # type: ignore[no-untyped-call]
        if given:
            given[0].register_hook(judged)  # type: ignore[no-untyped-call]

    def _place(self, call: Call) -> Place:
        return self.places.setdefault((call.name, call.site, call.layer), Place(call.name, layer=call.layer))

    def _judge(self, call: Call, reader: Callable[[Call], Iterator[Breach]] | None = None) -> None:
        place = self._place(call)
        if place.calls >= MOST or _lost(call):
            return
        call.number = place.calls
        place.calls += 1
        for read in READERS[call.name] if reader is None else (reader,):
            try:
                for breach in read(call):
                    place.breaches[breach.cause, breach.culprit].append(breach)
            except Exception as error:
                self.unread.append(f"{call.name} at {call.place}: {type(error).__name__}: {error}")


def _lost(call: Call) -> bool:
    """Whether what the model gave is NaN: of such values nothing can be said."""
    tensors = (v for v in call.given.values() if isinstance(v, torch.Tensor) and v.requires_grad)
    return any(v.is_floating_point() and bool(v.isnan().any()) for v in tensors)


def _by_hand(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Operations that losses are written with, as calls of their own."""
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, torch.Tensor):
        return name, {}
    if name in ("sub", "rsub", "mul", "__sub__"):
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if not isinstance(other, torch.Tensor):
            return name, {}
        sides = {"input": given, "target": other}
        if name == "mul" and given.shape == other.shape and given.dim() > 1:
            return "product", sides
        return ("difference", sides) if broadcasting.both_grow((tuple(given.shape), tuple(other.shape))) else (name, {})
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(dim, int):
        dim = dim % max(given.dim(), 1)
    elif name in ("log_softmax", "logsumexp"):
        dim = given.dim() - 1
    return name, {"input": given, "dim": dim}
