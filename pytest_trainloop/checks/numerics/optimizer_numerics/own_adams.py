"""Steps of a project's own Adam, compared with Adam's by the number of steps that its bias correction takes.

Each step is computed in float64 from the parameter and the gradients that were recorded, so that errors do not add up.
Only entries whose gradient is far above eps are compared. Before or after the bias correction, eps moves the
denominator by at most eps * (1 / sqrt(v) of the uncorrected average): that much error is allowed as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.optimizer_numerics.causes import found
from pytest_trainloop.instruments.optimizers.replay import first_entries, kind_of
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.torch_internals import has_step_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch

STEPS = 3

MOST = 512
"""Entries of a tensor that are copied."""

FAR = 1e4
"""A gradient that is so many times eps leaves eps no part in the step."""

SAME = 1e-4
"""Relative error up to which two updates are the same. One step more or fewer changes the second one by a third."""

ROUNDINGS = 32


@dataclass(slots=True)
class _Step:
    """One step of one tensor: its entries before and after, and what the step used."""

    place: int
    """Its place among the tensors that this step moves."""
    of: int
    """How many there are."""
    before: torch.Tensor
    grad: torch.Tensor
    options: dict[str, Any]
    after: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    state: tuple[torch.Tensor, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)


class OwnAdams:
    """The first steps of optimizers of a project's own that have two betas, by optimizer and parameter."""

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self.steps: dict[int, dict[int, list[_Step]]] = {}
        self._made: dict[int, int] = {}

    def take(self, optimizer: Any, watch: Watch) -> dict[int, tuple[torch.Tensor, _Step]] | None:
        made = self._made[id(optimizer)] = self._made.get(id(optimizer), 0) + 1
        if made > STEPS or has_step_hooks(optimizer) or kind_of(optimizer) is not None:
            return None
        moved = [(p, g) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        taken: dict[int, tuple[torch.Tensor, _Step]] = {}
        for place, (p, group) in enumerate(moved):
            index, options = watch.table.index(p), _options(group)
            plain = readable(p) and readable(p.grad) and p.grad.layout is torch.strided
            if index is not None and options is not None and plain and p.dtype in (torch.float32, torch.float64):
                taken[index] = p, _Step(place, len(moved), _entries(p), _entries(p.grad), options)
        return taken or None

    def use(self, optimizer: Any, taken: dict[int, tuple[torch.Tensor, _Step]], watch: Watch) -> None:
        number = watch.optimizers.index(optimizer)
        self.kinds[number] = type(optimizer).__name__
        for index, (p, step) in taken.items():
            state = optimizer.state.get(p, {})
            step.after = _entries(p)
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and readable(v)}
            step.state = tuple(_entries(v) for v in tensors.values() if v.shape == p.shape)
            numbers = {k: v for k, v in state.items() if isinstance(v, (int, float))}
            numbers |= {k: v for k, v in tensors.items() if v.numel() == 1}
            step.numbers = {str(k): float(v) for k, v in numbers.items()}
            self.steps.setdefault(number, {}).setdefault(index, []).append(step)


def _entries(tensor: torch.Tensor) -> torch.Tensor:
    return first_entries(MOST)(tensor.detach()).double().clone()


def _options(group: dict[str, Any]) -> dict[str, Any] | None:
    """The numbers of a group that has the options of Adam."""
    try:
        b1, b2 = (float(b) for b in group["betas"])
        named = {"lr": group["lr"], "eps": group.get("eps", 1e-8), "decay": group.get("weight_decay", 0.0)}
        return {"b1": b1, "b2": b2} | {k: float(v) for k, v in named.items()} if 0 < b1 < 1 and 0 < b2 < 1 else None
    except (KeyError, TypeError, ValueError, RuntimeError):  # no betas, more than two, or None
        return None


def miscounted(own: OwnAdams, record: Record, line: str) -> Iterator[Finding]:
    """Optimizers all of whose tensors move by Adam's step with one other count of the steps, and not with the right
    one."""
    counts: dict[str, Callable[[int, _Step], int]] = {
        "": lambda k, step: 1,
        "by tensor": lambda k, step: k * step.of + step.place + 1,
    }
    for number, tensors in own.steps.items():
        whole = {i: steps for i, steps in tensors.items() if len(steps) == STEPS}
        known = {i: steps for i, steps in whole.items() if bool(_compared(steps).any())}
        if not known or all(_moves(steps, lambda k, step: k + 1) for steps in known.values()):
            continue
        for variant, count in counts.items():
            if all(_moves(steps, count) for steps in known.values()):
                steps = next(iter(known.values()))
                last, b1, b2 = steps[-1], steps[-1].options["b1"], steps[-1].options["b2"]
                kept = [name for name, n in last.numbers.items() if {s.numbers.get(name) for s in steps} == {n}]
                facts = {"kind": own.kinds[number], "steps": STEPS, "tensors": len(known), "of": last.of}
                facts |= {"b1": b1, "b2": b2, "by": (1 - b2) ** 0.5 / (1 - b1), "kept": ", ".join(kept)}
                yield found("steps_miscounted", line, record.names(known), variant, **facts)
                break


def _compared(steps: list[_Step]) -> torch.Tensor:
    """The entries whose gradients are far above eps in each step."""
    far = [s.grad.abs() > FAR * max(s.options["eps"], 1e-12) for s in steps]
    return torch.stack(far).all(0)


def _moves(steps: list[_Step], count: Callable[[int, _Step], int]) -> bool:
    """Whether each step is Adam's with this count, whose decay is in the gradient, outside of it, or left out, and the
    state holds the two averages."""
    entries = _compared(steps)
    for coupled, decays in ((False, True), (True, True), (False, False)):
        m = v = torch.zeros_like(steps[0].grad)
        for k, s in enumerate(steps):
            b1, b2, lr = (s.options[name] for name in ("b1", "b2", "lr"))
            decay = s.options["decay"] if decays else 0.0
            g = s.grad + decay * s.before if coupled else s.grad
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            t = count(k, s)
            denominator = (v / (1 - b2**t)).sqrt() + s.options["eps"]
            update = -lr * m / (1 - b1**t) / denominator - (0.0 if coupled else lr * decay * s.before)
            size = s.before.abs() + lr
            allowed = (SAME + s.options["eps"] / v.sqrt()) * update.abs() + ROUNDINGS * torch.finfo(
                torch.float32
            ).eps * size
            same = (s.after - s.before - update).abs() <= allowed
            kept = all(any(_equal(average, held) for held in s.state) for average in (m, v))
            if not kept or not bool(same[entries].all()) or not bool((update.abs() > 10 * allowed)[entries].any()):
                break
        else:
            return True
    return False


def _equal(average: torch.Tensor, held: torch.Tensor) -> bool:
    return bool(((held - average).abs() <= SAME * average.abs().max()).all())
