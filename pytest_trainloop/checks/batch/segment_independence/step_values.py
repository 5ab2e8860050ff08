"""What meets the model's outputs in a loop's loss and has one value for each step of a rollout: returns, advantages,
targets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.same_start import SameStart, from_same_start
from pytest_trainloop.tracing.arguments import floats
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import Lineage, name_of, watched

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Mapping

    from pytest_trainloop.nested import Path
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.provenance import Node

FARTHEST = 400
"""Nodes between a meeting and the values of steps behind it."""


@dataclass(slots=True)
class Values:
    """What one call gave: a value for each step."""

    name: str
    place: str
    values: torch.Tensor


class StepValues(WatchingMode):
    """Values that have one entry for each step of a rollout, without a history, and which of them the loss reads."""

    def __init__(self, shape: torch.Size, flags: Callable[[], torch.Tensor | None]) -> None:
        super().__init__()
        self.found: list[Values] = []
        self.read: dict[int, None] = {}
        self.model_reads_flags = False
        self._shape, self._lineage = shape, Lineage()
        self._known: dict[int, tuple[Node, int]] = {}
        self._flags = flags

    def active(self) -> bool:
        watch = self.watch
        return super().active() and not watch.record.begun

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, name = self.watch, name_of(func)
        if not watched(name):
            return passed_on(func, args, kwargs)
        with watch.suspended():
            parents = self._lineage.before(name, args, kwargs)
            given = list(tensors_in(args, kwargs))
            if any(t.requires_grad for t in given):
                for tensor in given:
                    if not tensor.requires_grad and tensor.is_floating_point():
                        self._meets(tensor, name, bool(watch.module_path()))
        out = passed_on(func, args, kwargs)
        with watch.suspended():
            self._lineage.note(watch, func, name, args, kwargs, parents, out)
            target = args[0] if name == "__setitem__" and args else out
            for tensor in tensors_in(target):
                if self._is_of_steps(tensor) and not tensor.requires_grad:
                    self._keep(tensor, name)
        return out

    def _is_of_steps(self, tensor: torch.Tensor) -> bool:
        return bool(floats([tensor])) and tensor.shape[: len(self._shape)] == self._shape

    def _keep(self, tensor: torch.Tensor, name: str) -> None:
        node = self._lineage.of(tensor)
        self._known[id(node)] = (node, len(self.found))
        self.found.append(Values(name, str(here()[0]), tensor.detach().double().cpu().clone()))

    def _meets(self, tensor: torch.Tensor, name: str, in_model: bool) -> None:
        """Note the values of steps that stand nearest behind what meets a tensor with a history."""
        start = self._lineage.of(tensor)
        if id(start) not in self._known and self._is_of_steps(tensor) and not start.op:
            flags = self._flags()
            if flags is None or tensor.data_ptr() != flags.data_ptr():
                self.found.append(Values(name, str(here()[0]), tensor.detach().double().cpu().clone()))
                self.read[len(self.found) - 1] = None
        todo, seen = [start], set[int]()
        while todo and len(seen) < FARTHEST:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            known = self._known.get(id(node))
            if node.op == "batch" and in_model:
                self.model_reads_flags = True
            if known is not None and not in_model:
                self.read[known[1]] = None
            else:
                todo.extend(node.parents)

    def follow_flags(self, flags: torch.Tensor) -> None:
        self._lineage.adopt(flags)


class StepRuns:
    """Runs of one step, in float64 from one start, with other tensors in the batch. ``shape`` is that of one value for
    each step."""

    def __init__(self, evidence: Evidence, batch: Any, shape: torch.Size, flags: Path) -> None:
        self._evidence, self._batch, self._shape, self._flags = evidence, batch, shape, flags
        self._start = SameStart()
        seen = evidence.run()
        self._window = max(1, round(seen.items / seen.rounds)) if seen.rounds else 1

    def with_values(self, new: Mapping[Path, torch.Tensor]) -> StepValues | None:
        """What the loss reads of a run with these tensors in the batch; None where the loop cannot be run so."""
        item = nested.mapped(
            nested.copy(self._batch),
            lambda path, t: new[path].clone() if path in new else t,
            lambda value: isinstance(value, torch.Tensor),
        )
        flags: list[torch.Tensor] = []

        def note(number: int, given: Any) -> None:
            if not number:
                flags.extend(t for path, t in nested.paths(given) if path == self._flags)
                for tensor in flags:
                    mode.follow_flags(tensor)

        mode = StepValues(self._shape, lambda: flags[0] if flags else None)
        plan = from_same_start(self._evidence.plan(), self._start, lambda _loop: [item] * self._window)
        contexts = plan.contexts

        def around(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
            return (*mode.contexts(watch), *contexts(watch))

        plan = replace(plan, contexts=around, before_item=note, enough=_stepped, may_raise=True)
        record = self._evidence.rerun(plan)
        return mode if record.raised is None and record.double else None


def _stepped(record: Record) -> bool:
    return record.rounds >= 1
