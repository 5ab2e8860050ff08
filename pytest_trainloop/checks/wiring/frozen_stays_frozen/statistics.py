"""Running statistics and other buffers that follow the data although they are frozen."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.frozen_stays_frozen.causes import found
from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.recording.events import ModeCall
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.parameters import RUNNING
from pytest_trainloop.recording.record import within
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record, Statistics
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


def drifting(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Findings about running statistics that change although the weights of their norm are frozen."""
    # norms that are frozen alone, with no layer next to them: their weights stay at one and zero on purpose
    layers = any(len(p.shape) > 1 and not p.trainable and p.role == "model" for p in record.parameters)
    drifted = [s for s in record.statistics if s.drifted and _frozen(record, s.owner)]
    drifted = [s for s in drifted if layers or record.declared_frozen(s.name)]
    advice = [s for s in drifted if not record.declared_frozen(s.name) and not _within_training(record, s)]
    faults = [s for s in drifted if s not in advice]
    # behind something that trains they must follow what arrives (odd: apart_adapter_before_frozen_norms)
    fed = FrozenModules(evidence, [s.owner for s in faults]).fed if faults else set()
    faults = [s for s in faults if record.declared_frozen(s.name) or s.owner not in fed]
    for level, group in (("fault", faults), ("advice", advice)):
        owners, switched = {s.owner for s in group}, ""
        forward = next((f for f in record.root_forwards() if owners & set(f.in_training)), None)
        if forward is not None:  # the train() before it that put a norm into training mode
            for call in (c for c in record.of(ModeCall) if c.on and c.at < forward.at):
                if not call.below or any(_lies_below(record, call.below, owner) for owner in owners):
                    switched = str(call.place)
        if group:
            facts = {"statistics": len(group), "norms": len(owners), "steps": record.rounds}
            names = [s.name for s in group]
            yield found("statistics_drift", forward, names, level=level, change=switched, **facts)


def _frozen(record: Record, owner: str) -> bool:
    """Whether no weight of the norm trains or is written (odd: mean_teacher_with_batch_norms). A norm without weights
    counts where it is declared frozen."""
    weights = [p for p in record.parameters if p.owner == owner]
    changed = record.changed() | record.moved_outside_steps()
    return not any(p.trainable or p.index in changed for p in weights) and (
        bool(weights) or record.declared_frozen(owner)
    )


def _within_training(record: Record, statistics: Statistics) -> bool:
    """Whether the norm runs, with gradients on, within a module other parts of which are trained. Not where it belongs
    to a net that began with the weights of one that trains (a target, a momentum encoder), which follows at its own
    pace."""
    trained = {p.owner for p in record.parameters if p.index in record.held and record.reached(p.index)}
    calls = [f for f in record.root_forwards() if f.grad_enabled and statistics.owner in f.in_training]
    if not any(_lies_below(record, f.module, owner) for f in calls for owner in trained):
        return False
    part = statistics.owner.split(".")[0]
    weights = [p for p in record.parameters if len(p.shape) > 1]
    mine = [p for p in weights if p.name.split(".")[0] == part and p.start.raw]
    others = [p for p in weights if p.name.split(".")[0] != part and p.trainable]
    return not any(p.shape == q.shape and p.start.same(q.start) for p in mine for q in others)


def _lies_below(record: Record, root: str, owner: str) -> bool:
    """Whether the module at ``owner`` is the one called ``root`` or lies below it. A root under whose name no parameter
    lies is a whole model, which goes by the name of its class (pair: features_in_training_mode)."""
    return within(owner, [root]) or not any(within(p.owner, [root]) for p in record.parameters)


def other_buffers(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Findings about buffers that modules named in ``frozen=`` write in their own forward pass."""
    if record.frozen:
        for name, place in FrozenModules(evidence, record.frozen).written.items():
            yield found("statistics_drift", place, (name,), "another buffer")


class FrozenModules:
    """Watches modules below some paths in a run of its own."""

    def __init__(self, evidence: Evidence, paths: Sequence[str]) -> None:
        self.written: dict[str, str] = {}
        """Floating buffers that a module changes in its own forward pass, with the line of that call."""
        self.fed: set[str] = set()
        """Modules whose input has a history, so that trained parts lie before them."""
        evidence.rerun(contexts=lambda watch: (self._hooked(watch, paths),))

    @contextlib.contextmanager
    def _hooked(self, watch: Watch, paths: Sequence[str]) -> Iterator[None]:
        before: dict[int, dict[str, torch.Tensor]] = {}

        def enter(module: nn.Module, args: Any) -> None:
            with watch.suspended():
                if within(path := watch.table.path_of(module), paths):
                    before[id(module)] = {name: b.detach().clone() for name, b in _buffers(module)}
                    if torch.is_grad_enabled() and any(t.requires_grad for t in nested.tensors(args)):
                        self.fed.add(path)

        def leave(module: nn.Module, _args: Any, _output: Any) -> None:
            with watch.suspended():
                if old := before.pop(id(module), None):
                    path = watch.table.path_of(module)
                    for name, buffer in _buffers(module):
                        if name in old and not torch.equal(old[name], buffer):
                            self.written.setdefault(f"{path}.{name}" if path else name, str(here()[0]))

        with hooked(
            before_modules(unless_suspended(watch, enter)),
            after_modules(unless_suspended(watch, leave), always_call=True),
        ):
            yield


def _buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Floating buffers of its own, but for the running statistics of norms."""
    buffers = members.named_buffers(module, recurse=False)
    return [(name, b) for name, b in buffers if b.is_floating_point() and name not in RUNNING and readable(b)]
