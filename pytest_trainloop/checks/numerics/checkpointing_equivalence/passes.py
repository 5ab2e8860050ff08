"""The backward passes of two runs compared: the losses, and the gradients that arrived."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import Agreement, agreement, by_tensor
from pytest_trainloop.gradients.vectors import Gradient, values, vectors
from pytest_trainloop.recording.events import Backward, Step
from pytest_trainloop.recording.samples import as_real

if TYPE_CHECKING:
    from pytest_trainloop.checks.numerics.checkpointing_equivalence.fixed_weights import Run
    from pytest_trainloop.recording.record import Record

WRAPPED = "_checkpoint_wrapped_module."
"""What torch's checkpoint wrapper adds to the names of parameters."""


def plain_name(name: str) -> str:
    """The name that a parameter has in a model that is not wrapped."""
    return name.replace(WRAPPED, "").replace("_orig_mod.", "")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first backward pass whose gradients differ between two runs."""

    nth: int
    loss: tuple[float, float]
    """What was backpropagated in each run."""
    gradients: Agreement
    names: tuple[str, ...]
    """Parameters whose gradients differ."""
    without_gradient: tuple[str, ...]
    """Those of them that get none in the first run."""
    place: str
    forward: bool
    """Whether the losses differ as well."""

    @property
    def drifted(self) -> bool:
        """Whether the loss of a later pass is the first to differ: generators, or some state, have advanced otherwise
        by then, and no gradient was wrong."""
        return self.forward and self.nth > 0


def difference(on: Run, off: Run, bound: float) -> Difference | None:
    """None where the passes that both runs have agree within ``bound``, relative to the larger gradient."""
    judged = held_names(off.record)
    for nth, (a, b) in enumerate(zip(passes(on.record), passes(off.record), strict=False)):
        mine, others = (gradients(r, p, judged) for r, p in ((on, a), (off, b)))
        vector = vectors([others, mine])
        if not any(bool(torch.isfinite(v).all()) for v in vector):
            raise CannotDecide("the gradients are not finite, with checkpointing and without (see finite)")
        found = agreement(*vector)
        if not found.difference <= bound:
            names = tuple(n for n in sorted({*mine, *others}) if not _alike(mine, others, n, bound))
            missing = tuple(n for n in names if n not in mine)
            loss = (_total(a), _total(b))
            forward = not all(_near(x.value, y.value, bound) for x, y in zip(a.roots, b.roots, strict=False))
            return Difference(nth, loss, found, names, missing, str(b.place), forward or len(a.roots) != len(b.roots))
    return None


def tensors_apart(on: Run, off: Run, bound: float) -> dict[str, Agreement]:
    """The gradients of the first pass in which both runs differ, without checkpointing and with it, at each parameter;
    empty where none does."""
    judged = held_names(off.record)
    for a, b in zip(passes(on.record), passes(off.record), strict=False):
        found = by_tensor(gradients(off, b, judged), gradients(on, a, judged))
        if any(not told.difference <= bound for told in found.values()):
            return found
    return {}


def passes(record: Record) -> list[Backward]:
    """The backward passes from the weights that the run began with; of several within one step, the first."""
    no_steps = not any(o.steps for o in record.optimizers)
    until = min((m.at for m in record.moves), default=math.inf) if no_steps else math.inf
    taken: set[int] = set()
    found = []
    for backward in record.autograd_passes():
        around = next((i for i, s in enumerate(record.of(Step)) if s.at < backward.at < s.until), None)
        if backward.at < until and (around is None or around not in taken):
            found.append(backward)
        if around is not None:
            taken.add(around)
    return found


def held_names(record: Record) -> set[str]:
    """The parameters that an optimizer holds and that are not declared frozen; all where there is no optimizer."""
    held = record.held or {p.index: () for p in record.parameters}
    return {plain_name(record.name(i)) for i in held if not record.declared_frozen(record.name(i))}


def gradients(run: Run, backward: Backward, judged: set[str]) -> Gradient:
    """The contents of ``.grad`` after one pass, by parameter; what arrived last where nothing was accumulated, as with
    ``torch.autograd.grad``."""
    record, accumulated = run.record, run.grads.get(backward.at, {})
    found: Gradient = {}
    for index, arrived in backward.arrivals.items():
        name, last = plain_name(record.name(index)), arrived[-1].incoming
        if name not in judged:
            continue
        if index in accumulated:
            found[name] = _wide(accumulated[index])
        elif last.raw and not last.sparse:
            found[name] = values(last, record.parameters[index].dtype)
    return found


def _wide(entries: torch.Tensor) -> torch.Tensor:
    return as_real(entries).reshape(-1).to("cpu", torch.float64)


def _alike(a: Gradient, b: Gradient, name: str, bound: float) -> bool:
    return agreement(*vectors([{name: g[name]} if name in g else {} for g in (a, b)])).difference <= bound


def _near(a: float, b: float, bound: float) -> bool:
    return a == b or (a != a and b != b) or abs(a - b) <= bound * max(abs(a), abs(b))


def _total(backward: Backward) -> float:
    return math.fsum(root.value for root in backward.roots)
