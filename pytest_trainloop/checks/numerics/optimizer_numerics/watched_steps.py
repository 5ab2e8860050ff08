"""What watched steps show: an eps that is 0 where it is added, steps that divide by it, counts in low precision.

The denominator of a step is sqrt(v) + eps. With both 0 the step is m / 0, infinite, or 0 / 0, NaN.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.optimizer_numerics import own_adams
from pytest_trainloop.checks.numerics.optimizer_numerics.causes import found
from pytest_trainloop.instruments.optimizers.replay import first_entries, kind_of, snapshot
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import CASTS
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.optimizers.replay import Snapshot
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST_ENTRIES = 4096
"""Entries of a tensor that are copied: all of a small one, and a small part of the memory of a large one."""

OPTIMIZERS = 8
"""Optimizers that are watched: some loops build one for every batch (odd: throwaway_optimizer_for_every_batch)."""

COUNTED_TO = {torch.bfloat16: 2**8, torch.float16: 2**11}
"""The largest integer to which 1 can be added: the next number of the dtype after it is two further on."""

ROOTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), "exp_avg_sq"),
    **{"Adamax": "exp_inf", "Adagrad": "sum", "RMSprop": "square_avg"},
}
"""The state of each optimizer from which its denominator is made; ``eps`` is added in the dtype of that state."""


@dataclass(slots=True)
class OptimizerStart:
    """One optimizer: its first step, and what its first two steps show."""

    snap: Snapshot
    zero_eps: dict[tuple[float, torch.dtype], set[int]] = field(default_factory=dict)
    """Parameters by an ``eps`` and the dtype of the state in which it is 0."""
    counts: dict[torch.dtype, set[int]] = field(default_factory=dict)
    """Parameters by the low-precision dtype in which their steps are counted."""


class FirstSteps:
    """A short run in which the first steps of every optimizer are watched, or the run that is observed."""

    def __init__(self) -> None:
        self.found: dict[int, OptimizerStart] = {}
        self.own = own_adams.OwnAdams()
        self.record: Record

    @classmethod
    def of(cls, evidence: Evidence) -> FirstSteps:
        """A further run, as far as it needs to go."""
        first, seen = cls(), evidence.run()
        wanted = {o.index for o in seen.optimizers if o.steps}
        least = {o.index: min(2 if o.from_torch else own_adams.STEPS, o.steps) for o in seen.optimizers}

        def enough(record: Record) -> bool:
            made = {o.index for o in record.optimizers if o.steps >= least.get(o.index, 2)}
            return wanted <= made or record.rounds >= FULL_ROUNDS

        evidence.rerun(enough=enough, contexts=first.contexts)
        return first

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What the run is made in."""
        self.record = watch.record
        steps: dict[int, int] = {}

        def take(optimizer: Any) -> Snapshot | None:
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
            if steps[id(optimizer)] > 2 or len(self.found) >= OPTIMIZERS:
                return None
            return snapshot(optimizer, watch, first_entries(MOST_ENTRIES), lambda p: True)

        def use(optimizer: Any, snap: Snapshot) -> None:
            start = self.found.setdefault(watch.optimizers.index(optimizer), OptimizerStart(snap))
            for group in optimizer.param_groups:
                for p in group["params"]:
                    index, state = watch.table.index(p), optimizer.state.get(p, {})
                    if index is None or p.grad is None:
                        continue
                    if (root := zero_eps_root(snap.kind.__name__, group, state)) is not None:
                        start.zero_eps.setdefault((float(group["eps"]), root[1].dtype), set()).add(index)
                    count = state.get("step")
                    if isinstance(count, torch.Tensor) and count.dtype in COUNTED_TO:
                        start.counts.setdefault(count.dtype, set()).add(index)

        own = functools.partial(self.own.take, watch=watch), functools.partial(self.own.use, watch=watch)
        return around_steps(watch, take, use), around_steps(watch, *own)


def zero_eps_root(kind: str, group: dict[str, Any], state: dict[str, Any]) -> tuple[str, torch.Tensor] | None:
    """The name and the values of the state to which an ``eps`` is added that is 0 in its dtype."""
    name = "max_exp_avg_sq" if group.get("amsgrad") and kind != "Adagrad" else ROOTS.get(kind, "")
    root, eps = state.get(name), group.get("eps")
    if not isinstance(root, torch.Tensor) or not (root.is_floating_point() or root.is_complex()):
        return None
    # a fused step adds eps in float32, a capturable one divides it by the learning rate first
    # (odd: fused_adam_in_float16)
    if not isinstance(eps, (int, float)) or any(group.get(f) for f in ("fused", "capturable", "differentiable")):
        return None
    real: torch.dtype = getattr(torch, torch.finfo(root.dtype).dtype)
    return None if bool(torch.tensor(eps, dtype=torch.float64).to(real)) else (name, root)


class ZeroDenominators(WatchingMode):
    """A run in which finite entries are looked for that become non-finite by a step whose denominator is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.divided: dict[int, dict[str, Any]] = {}
        """Of each parameter that such a step made non-finite, by its index, the facts of the first."""
        self.record: Record
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        """Casts of the loop to low precision, each result with its line."""

    @classmethod
    def of(cls, evidence: Evidence) -> ZeroDenominators:
        """Raises ``CannotDecide`` where no further run can be made."""
        zero = cls()
        zero.record = evidence.rerun(contexts=zero.contexts)
        return zero

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        if name not in CASTS or not isinstance(out, torch.Tensor) or out.dtype not in COUNTED_TO:
            return out
        if any(t.is_floating_point() and t.dtype not in COUNTED_TO for t in tensors_in(args)):
            self._casts[id(out)] = weakref.ref(out), str(here()[0])
        return out

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        steps: dict[int, int] = {}

        def take(optimizer: Any) -> list[tuple[torch.Tensor, dict[str, Any]]] | None:
            """The parameters that are finite, and so is their gradient, each with its group."""
            if not watch.full or kind_of(optimizer) is None:
                return None
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
            return [(p, group) for group in optimizer.param_groups for p in group["params"] if _finite(p)]

        def use(optimizer: Any, finite: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
            kind = getattr(kind_of(optimizer), "__name__", "")
            for p, group in finite:
                index, known = watch.table.index(p), zero_eps_root(kind, group, optimizer.state.get(p, {}))
                if known is None or p.grad is None or index is None or index in self.divided:
                    continue
                name, root = known
                bad = (root == 0) & ~p.isfinite() if root.shape == p.shape else torch.zeros(1, dtype=torch.bool)
                if bool(bad.any()):
                    cast, made_at = self._casts.get(id(root), (None, ""))
                    self.divided[index] = {
                        "kind": kind,
                        "eps": float(group["eps"]),
                        "dtype": named(root.dtype),
                        "step": steps[id(optimizer)],
                        "count": int(bad.sum()),
                        "without": int((bad & (p.grad == 0)).sum()),
                        "entries": p.numel(),
                        "state": name,
                        "weights": named(p.dtype),
                        "change": made_at if cast is not None and cast() is root else "",
                    }

        with around_steps(watch, take, use), super().watching(watch):
            yield


def zero_eps(evidence: Evidence, first: FirstSteps, line: str) -> Iterator[Finding]:
    """Each eps that is 0: the steps that divide by it, or advice where none did."""
    if not any(start.zero_eps for start in first.found.values()):
        return
    zero = evidence.shared(ZeroDenominators.of)
    for cause, missing in (("eps_underflows", False), ("eps_missing", True)):
        divided = {index: facts for index, facts in zero.divided.items() if (facts["eps"] == 0.0) is missing}
        if divided:
            index = min(divided, key=lambda i: divided[i]["step"])
            facts = {**divided[index], "first": zero.record.name(index)}
            variant = "state in float16" if facts["dtype"] == "float16" != facts["weights"] else ""
            yield found(cause, line, map(zero.record.name, divided), variant, **facts)
    for start in first.found.values() if not zero.divided else ():
        for (eps, dtype), indices in start.zero_eps.items():
            if eps:  # no eps at all is a fault only where it is seen (odd: rmsprop_without_eps)
                info = torch.finfo(dtype)
                facts = {"kind": start.snap.kind.__name__, "eps": eps, "dtype": named(dtype), "tensors": len(indices)}
                facts |= {"least": info.tiny * info.eps, "level": "advice"}
                yield found("eps_underflows", line, first.record.names(indices), "no harm so far", **facts)


def low_precision_counts(first: FirstSteps, line: str) -> Iterator[Finding]:
    """Every step count that is kept in low precision."""
    for start in first.found.values():
        for dtype, indices in start.counts.items():
            last = COUNTED_TO[dtype]
            facts = {"kind": start.snap.kind.__name__, "dtype": named(dtype), "tensors": len(indices)}
            yield found("step_count_saturates", line, first.record.names(indices), last=last, next=last + 2, **facts)


def _finite(p: torch.Tensor) -> bool:
    pair = [t for t in (p, p.grad) if t is not None and readable(t) and t.layout is torch.strided]
    return len(pair) == 2 and all(bool(t.isfinite().all()) for t in pair)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
