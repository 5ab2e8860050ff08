"""Where a gradient is lost: operations that take a tensor with a history and give one without, each put to the test.

A diagnostic run lists the candidates. Then the loop is run again with a candidate left out (a detach that passes its input on, a no_grad that is none, a
rounding that is straight-through): if the gradient is there now, that operation is the cut. Where an operation cannot be left out (numpy, float), what it
returned is moved instead: if the loss moves with it, the value crosses there without its gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from pytest_trainloop.evidence.dependence import difference, roots_before_first_step
from pytest_trainloop.observe.record import Place, Record, Site
from pytest_trainloop.observe.source import here
from pytest_trainloop.observe.watch import Watch

if TYPE_CHECKING:
    from pytest_trainloop.evidence import Evidence

Kind = Literal["detach", "grad_off", "value", "flat", "dead"]

_DETACHES = frozenset({"detach", "detach_", "data"})
_VALUES = frozenset({"item", "tolist", "numpy", "__float__", "__array__", "__int__", "__complex__", "__index__", "tensor", "as_tensor"})
_FLAT = frozenset(
    """round round_ floor floor_ ceil ceil_ trunc trunc_ fix sign sign_ sgn heaviside clamp clamp_ clip clamp_min clamp_max hardtanh hardtanh_
    hardsigmoid hardswish relu6 threshold""".split()
)
_CAN_DIE = frozenset({"relu", "relu_", "softmax", "log_softmax", "layer_norm", "group_norm", "instance_norm", "batch_norm", "leaky_relu"})
_MOST = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """One operation at one line."""

    kind: Kind
    op: str
    place: Place
    site: Site
    module: str

    def matches(self, op: str, site: Site) -> bool:
        return self.op == op and self.site == site


@dataclass(frozen=True, slots=True)
class Cut:
    """The operation where the gradient is lost. ``gradient`` is the largest entry that arrives with it left out, None where its value was moved instead."""

    candidate: Candidate
    gradient: float | None
    change: float = 0.0
    reached: frozenset[str] = frozenset()


class _Lister(TorchFunctionMode):
    """Lists candidates, and does to the chosen ones what it is told."""

    def __init__(self, watch: Watch, chosen: Sequence[Candidate] = (), *, nudge: bool = False) -> None:
        super().__init__()
        self._watch = watch
        self._chosen = chosen
        self._nudge = nudge
        self.found: dict[tuple[str, Site], Candidate] = {}
        self.touched: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._watch.quiet or self._watch.stepping or self._watch.backward is not None:
            return func(*args, **kwargs)
        name = _name(func)
        given = list(_tensors(args, kwargs))
        for tensor in given:
            index = self._watch.book.index(tensor)
            if index is not None and torch.is_grad_enabled():
                self.touched.add(index)
        if not any(t.requires_grad for t in given):
            return func(*args, **kwargs)
        site = here(2)[1]
        chosen = next((c for c in self._chosen if c.matches(name, site)), None)
        if chosen is not None:
            return self._altered(chosen, func, args, kwargs, given)
        out = func(*args, **kwargs)
        kind = _kind(name, given, out)
        if kind is not None and (name, site) not in self.found:
            place = here(2)[0]
            self.found[name, site] = Candidate(kind, name, place, site, self._watch.module_path())
        return out

    def _altered(self, chosen: Candidate, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        if self._nudge:
            return _nudged(func(*args, **kwargs))
        if chosen.kind == "grad_off":
            with torch.inference_mode(False), torch.enable_grad():
                return func(*args, **kwargs)
        if chosen.op in ("numpy", "tolist", "__float__", "__array__", "__int__", "__complex__", "__index__"):
            return func(*args, **kwargs)
        return given[0]


def _kind(name: str, given: list[torch.Tensor], out: Any) -> Kind | None:
    """What kind of candidate a call is, if any."""
    if name in _DETACHES:
        return "detach"
    if name in _VALUES:
        return "value"
    outputs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
    if name in _FLAT:
        return "flat"
    if name in _CAN_DIE and _constant(name, given, outputs):
        return "dead"
    if outputs and not any(t.requires_grad for t in outputs) and not name.startswith("__get"):
        grad_off = not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        if grad_off and any(t.is_floating_point() or t.is_complex() for t in outputs):
            return "grad_off"
        return "value"
    return None


def _constant(name: str, given: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an activation or a normalisation gives the same for whatever comes in: every unit off, or only one entry to normalise."""
    if not outputs or outputs[0].numel() == 0:
        return False
    out = outputs[0].detach()
    if name in ("relu", "relu_", "leaky_relu"):
        return name != "leaky_relu" and not bool(out.any())
    if name in ("softmax", "log_softmax"):
        return bool((out == (1.0 if name == "softmax" else 0.0)).all())
    bias = given[-1].detach() if len(given) > 2 else None
    return bool((out == out.flatten()[0]).all()) and (bias is None or bias.numel() == 1)


def _nudged(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return out + 0.01 * out.abs() + 0.01 if out.is_floating_point() else out.roll(1, -1) if out.dim() else out
    if isinstance(out, (float, complex)):
        return out * 1.01 + 0.01
    if isinstance(out, list):
        return [_nudged(o) for o in out]
    if hasattr(out, "dtype") and hasattr(out, "astype") and out.dtype.kind == "f":
        return (out * 1.01 + 0.01).astype(out.dtype)
    return out


def find_cut(evidence: Evidence, names: Sequence[str], kinds: set[Kind]) -> tuple[Cut | None, set[str]]:
    """The operation that keeps the gradient from these parameters, and the names of all parameters that entered some computation."""
    listed, lister = _listed(evidence, names, [], nudge=False)
    touched = {listed.parameters[i].name for i in lister.touched}
    candidates = [c for c in reversed(lister.found.values()) if c.kind in kinds][:_MOST]
    off = [c for c in candidates if c.kind == "grad_off"]
    if off and _gradients(evidence, names, off):
        return _reduced(evidence, names, off, earliest=True), touched
    for candidate in candidates:
        if candidate.kind != "grad_off" and (reached := _gradients(evidence, names, [candidate])):
            return _cut(candidate, reached), touched
    if len(candidates) > 1 and _gradients(evidence, names, candidates):
        return _reduced(evidence, names, candidates, earliest=False), touched
    base = roots_before_first_step(listed, names)
    for candidate in candidates:
        if candidate.kind == "value":
            moved, _ = _listed(evidence, names, [candidate], nudge=True)
            change = difference(base, roots_before_first_step(moved, names))
            if change > 1e-6:
                return Cut(candidate, None, change), touched
    return None, touched


def _cut(candidate: Candidate, reached: dict[str, float]) -> Cut:
    return Cut(candidate, max(reached.values()), reached=frozenset(reached))


def _reduced(evidence: Evidence, names: Sequence[str], candidates: list[Candidate], *, earliest: bool) -> Cut:
    """Of operations that restore the gradient together, those that are needed; the one nearest to the loss, or the first that ran."""
    lines = {(c.place.file, c.place.line) for c in candidates}
    needed = list(candidates)
    for line in lines if len(lines) > 1 else ():
        rest = [c for c in needed if (c.place.file, c.place.line) != line]
        if rest and len(_gradients(evidence, names, rest)) == len(_gradients(evidence, names, needed)):
            needed = rest
    return _cut(needed[-1 if earliest else 0], _gradients(evidence, names, needed))


def _gradients(evidence: Evidence, names: Sequence[str], left_out: list[Candidate]) -> dict[str, float]:
    """The largest gradient entry at each of the parameters that a gradient reaches with these operations left out."""
    record, _ = _listed(evidence, names, left_out, nudge=False)
    wanted = [p for p in record.parameters if p.name in set(names)]
    peaks = {p.name: max((a.incoming.peak for a in record.arrivals(p.index)), default=0.0) for p in wanted}
    return {name: peak for name, peak in peaks.items() if peak > 0}


def _listed(evidence: Evidence, names: Sequence[str], chosen: list[Candidate], *, nudge: bool) -> tuple[Record, _Lister]:
    made: list[_Lister] = []

    def contexts(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        made.append(_Lister(watch, chosen, nudge=nudge))
        yield made[0]

    record = evidence.short_run(lambda watch: None, names, contexts)
    return record, made[0]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, torch.Tensor))


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return "data" if attribute == "data" else "__get__"
    return name
