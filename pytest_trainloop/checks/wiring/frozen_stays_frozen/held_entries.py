"""Entries whose gradient user code sets to zero, the same ones before every step, and that the steps move all the same.

A further run compares the gradient that arrives with the one that the step finds, entry by entry.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.frozen_stays_frozen.causes import found
from pytest_trainloop.recording.events import GradWrite, Step
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.torch_internals import has_gradient_hooks, hooks_of
from pytest_trainloop.runs.hooks import around_steps, stepped_by
from pytest_trainloop.runs.optimizer_options import without_weight_decay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

LEAST_STEPS = 3
"""Steps that must find the same entries at zero."""


@dataclass(eq=False)
class Held:
    """The entries of one parameter that user code holds so far, and how steps moved them."""

    name: str
    came: torch.Tensor
    """Where a gradient arrived since it was cleared."""
    entries: torch.Tensor
    """Those that found a zero where a gradient had arrived."""
    trained: torch.Tensor
    """Those that found another gradient, once the first was held."""
    before: torch.Tensor | None = None
    """The values before the last step, where it moved what is held."""
    steps: int = 0
    moves: int = 0
    update: float = 0.0
    from_zero: bool = True
    """Whether all that is held was zero at first: pruned."""
    at: Step | None = None
    """The first of the steps."""

    @property
    def holds(self) -> bool:
        """Whether others trained, and these are whole rows or filters, or were zero: a mask by a limit is neither
        (odd: no_gradient_past_the_limit)."""
        whole = self.from_zero or any(self._whole(axis) for axis in range(self.entries.dim()))
        return self.steps >= LEAST_STEPS and bool(self.trained.any()) and whole

    @property
    def changes(self) -> bool:
        """Whether an entry was held at one step, and trained at another since."""
        return bool((self.entries & self.trained).any())

    def _whole(self, axis: int) -> bool:
        held, other = (m.movedim(axis, 0).reshape(m.shape[axis], -1).any(1) for m in (self.entries, self.trained))
        return not (held & other).any()


@dataclass(eq=False)
class HeldEntries:
    """What one run shows."""

    seen: dict[int, Held] = field(default_factory=dict)

    @classmethod
    def of(cls, evidence: Evidence, **plan: Any) -> list[Held]:
        """Those of a further run, where user code writes gradients or puts hooks on them."""
        record = evidence.run()
        writes = any(w.how in ("altered", "assigned") for w in record.of(GradWrite))
        if not evidence.repeatable or len(record.of(Step)) < LEAST_STEPS or not (writes or _hooks(evidence)):
            return []
        own = cls()
        further = plan.get("contexts", lambda _watch: ())
        evidence.rerun(contexts=lambda watch: (own._watching(watch), *further(watch)))
        seen = list(own.seen.values())
        # a mask by size or by chance is another at each step, if not in every tensor (odd: largest_gradients_only)
        return [] if any(held.changes for held in seen) else [held for held in seen if held.holds]

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        # the first hook of each sees what arrives: a mask in a hook lies before any hook of ours
        for tensor in (t for t in watch.table.tensors if t.is_leaf and t.requires_grad and has_gradient_hooks(t)):
            hooks = hooks_of(tensor)[0]
            first = next(iter(hooks))
            hooks[first] = partial(self._through, watch, tensor, hooks[first])
        with around_steps(watch, partial(self._take, watch), self._use):
            yield

    def _through(self, watch: Watch, tensor: torch.Tensor, hook: Callable[[Any], Any], gradient: Any) -> Any:
        self._arrived(watch, tensor, gradient)
        return hook(gradient)

    def _arrived(self, watch: Watch, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is None or gradient.layout is not torch.strided or not readable(gradient) or not gradient.dim():
            return
        with torch.no_grad(), watch.suspended():
            held, came = self.seen.get(id(tensor)), (gradient != 0) & gradient.isfinite()
            if held is None:
                nothing = torch.zeros_like(came)
                index = watch.table.index(tensor)
                name = "" if index is None else watch.table.entries[index].name
                self.seen[id(tensor)] = Held(name, came, nothing, nothing)
            else:
                held.came = came if tensor.grad is None or not tensor.grad.any() else came | held.came

    def _take(self, watch: Watch, optimizer: Any) -> list[tuple[Held, torch.Tensor, torch.Tensor]]:
        taken = []
        for _, _, p in stepped_by(optimizer):
            held = self.seen.get(id(p))
            if held is None or p.grad is None or held.came.shape != p.shape or p.grad.layout is not torch.strided:
                continue
            self._come_back(held, p)
            at_zero = p.grad == 0
            now = held.came & at_zero
            if not held.steps and now.any():
                held.from_zero, held.at = not p[now].any(), watch.thread.open[-1] if watch.thread.open else None
            if held.steps or now.any():
                held.entries, held.trained = held.entries | now, held.trained | ~at_zero
                held.steps += 1
                taken.append((held, p, p.detach().clone()))
        return taken

    def _come_back(self, held: Held, p: torch.Tensor) -> None:
        """Count the move of the step before, unless the entries are where they were: user code put them back."""
        if held.before is not None:
            moved = (p - held.before)[held.entries].abs()
            held.moves += bool(moved.any())
            held.update = max(held.update, float(moved.max()))
            held.before = None

    def _use(self, _optimizer: Any, taken: list[tuple[Held, torch.Tensor, torch.Tensor]]) -> None:
        for held, p, before in taken:
            held.before = before if (p != before)[held.entries].any() else None


def _hooks(evidence: Evidence) -> bool:
    modules = evidence.fresh_loop().modules.values()
    return any(has_gradient_hooks(p) for module in modules for p in module.parameters())


def moved_entries(evidence: Evidence) -> Iterator[Finding]:
    """Findings about held entries that steps move: by weight decay where nothing else does, else by momentum."""
    moved = [held for held in evidence.shared(HeldEntries.of) if held.moves > 1]
    if not moved:
        return
    without = {h.name for h in HeldEntries.of(evidence, contexts=without_weight_decay) if h.moves > 1}
    for cause in ("momentum", "weight_decay"):
        mine = [held for held in moved if (held.name in without) is (cause == "momentum")]
        if mine:
            most = max(mine, key=lambda held: held.update)
            facts = {"most": most.name, "held": int(most.entries.sum()), "entries": most.entries.numel()}
            facts |= {"steps": most.moves, "rounds": most.steps, "update": most.update, "from_zero": most.from_zero}
            if cause == "momentum" and most.at is not None:  # no option of the optimizer puts them back
                facts["change"] = str(most.at.place)
            yield found(cause, most.at, [held.name for held in mine], "entries", **facts)
