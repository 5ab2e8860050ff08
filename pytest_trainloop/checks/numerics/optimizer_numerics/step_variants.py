"""The fused, foreach and for-loop variants of one step, each compared with the for-loop variant in float64.

A step rounds at most some thirty times on the way to an entry, each time by at most half an eps of p, of the update or,
where terms cancel (g + decay * p), of its inputs. ``ROUNDINGS`` eps of the first two, and ``ROUNDINGS`` times what an
eps on p, g or the state makes of the result, bound the error of a right variant. Two steps are made: in the second, the
state counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.replay import REFUSED, WIDE, Group, Member, Snapshot, entrywise, stepped
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIANTS: dict[str, dict[str, Any]] = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}

STEPS = 2

ROUNDINGS = 32


@dataclass(frozen=True, slots=True)
class WrongVariant:
    """A variant of the step that is farther from the reference than rounding allows."""

    kind: str
    variant: str
    index: int
    """Of the parameter with the worst entry."""
    dtype: str
    error: float
    """At the worst entry."""
    update: float
    """Largest update of that tensor."""
    allowed: float
    """What rounding allows at that entry."""
    in_use: bool
    """Whether the loop uses this variant."""
    right: tuple[str, ...]
    """Variants that are right on the same tensor in the same dtype."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Peak memory by variant on a GPU, in bytes."""


@dataclass(frozen=True, slots=True)
class _Error:
    size: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.size / self.allowed


def wrong_variants(snap: Snapshot) -> Iterator[WrongVariant]:
    """For each variant that is wrong, the tensor with the largest error; first in float64, then in the dtype of the
    parameters. Nothing where the optimizer cannot be rebuilt."""
    peaks: dict[str, int] = {}
    try:
        references = _references(snap)
    except REFUSED as error:
        reraise_raised(error)
        return
    low = any(m.entries.dtype not in (torch.float64, torch.complex128) for m in snap.members)
    known = [name for name in VARIANTS if name == "for-loop" or all(name in g.options for g in snap.groups)]
    for wide in (True, False) if low else (True,):
        made = {name: got for name in known if (got := _made(snap, name, wide, peaks)) is not None}
        errors = {name: _errors(snap, references, got, {}) for name, got in made.items()}
        if any(error.size > error.allowed for found in errors.values() for error in found.values()):
            sensitivity = _sensitivity(snap, references, wide)
            errors = {name: _errors(snap, references, got, sensitivity) for name, got in made.items()}
        for name, found in errors.items():
            index = max(found, key=lambda i: found[i].ratio)
            if found[index].size > found[index].allowed:
                yield WrongVariant(
                    kind=snap.kind.__name__,
                    variant=name,
                    index=index,
                    dtype=str(made[name][index].dtype).removeprefix("torch."),
                    error=found[index].size,
                    update=references[index].update,
                    allowed=found[index].allowed,
                    in_use=name == in_use(snap, index),
                    right=tuple(other for other in made if errors[other][index].size <= errors[other][index].allowed),
                    peaks=peaks,
                )


def _errors(
    snap: Snapshot,
    references: dict[int, _Reference],
    got: dict[int, torch.Tensor],
    sensitivity: dict[int, torch.Tensor],
) -> dict[int, _Error]:
    return {m.index: _error(references[m.index], got[m.index], sensitivity.get(m.index)) for m in snap.members}


def _sensitivity(snap: Snapshot, references: dict[int, _Reference], wide: bool) -> dict[int, torch.Tensor]:
    """By how much the reference changes, entry by entry, if p, g and the state are an eps larger."""
    total = {index: torch.zeros_like(reference.size) for index, reference in references.items()}
    for what in ("entries", "grad", "state"):
        perturbed = stepped(_perturbed(snap, references, what, wide), wide=True, steps=STEPS)
        for index, moved in perturbed.items():
            total[index] += (moved - references[index].after).abs().nan_to_num(0.0, 0.0)
    return total


def _perturbed(snap: Snapshot, references: dict[int, _Reference], what: str, wide: bool) -> Snapshot:
    """The copies with one of the three an eps larger; p by an eps of the largest value that it takes."""

    def member(m: Member) -> Member:
        eps = torch.finfo(torch.float64 if wide else m.entries.dtype).eps
        if what == "state":
            return replace(m, state={k: _wide(v) * (1.0 + eps) if entrywise(k, v) else v for k, v in m.state.items()})
        if what == "grad":
            return replace(m, grad=_wide(m.grad) * (1.0 + eps))
        return replace(m, entries=_wide(m.entries) + eps * references[m.index].size)

    return Snapshot(snap.kind, tuple(Group(g.options, tuple(map(member, g.members))) for g in snap.groups))


def in_use(snap: Snapshot, index: int) -> str:
    """The variant that the loop's own optimizer uses for a parameter: by default foreach on any device but a CPU."""
    group = next(g for g in snap.groups if any(m.index == index for m in g.members))
    options, (member, *_) = group.options, group.members
    if options.get("fused"):
        return "fused"
    default = member.entries.device.type != "cpu" and not options.get("differentiable")
    asked = options.get("foreach")
    return "foreach" if asked or (asked is None and default) else "for-loop"


def _made(snap: Snapshot, name: str, wide: bool, peaks: dict[str, int]) -> dict[int, torch.Tensor] | None:
    """The entries after the steps of one variant; None where it does not accept these tensors or options."""
    device = snap.members[0].entries.device
    try:
        if device.type != "cuda":
            return stepped(snap, wide=wide, steps=STEPS, **VARIANTS[name])
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        got = stepped(snap, wide=wide, steps=STEPS, **VARIANTS[name])
        peaks[name] = torch.cuda.max_memory_allocated(device) - before
    except REFUSED as error:
        reraise_raised(error)
        return None
    return got


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(WIDE.get(tensor.dtype, tensor.dtype))


def _error(reference: _Reference, got: torch.Tensor, sensitivity: torch.Tensor | None) -> _Error:
    """The error of the worst entry, and what rounding allows there."""
    info = torch.finfo(got.dtype)
    finite = reference.after.isfinite()
    if not bool(finite.any()):
        return _Error(0.0, 1.0)
    allowed = ROUNDINGS * info.eps * (reference.size + reference.update + info.tiny)
    allowed = allowed if sensitivity is None else allowed + ROUNDINGS * sensitivity
    size = (got.to(reference.after.dtype) - reference.after).abs().nan_to_num(math.inf, math.inf)
    worst = int((size / allowed).nan_to_num(0.0, math.inf)[finite].argmax())
    return _Error(float(size[finite][worst]), float(allowed[finite][worst]))


@dataclass(frozen=True, slots=True)
class _Reference:
    """The steps of one parameter by the for-loop variant in float64."""

    after: torch.Tensor
    size: torch.Tensor
    """Largest absolute value of each entry on the way."""
    update: float
    """Largest change of an entry in one step."""


def _references(snap: Snapshot) -> dict[int, _Reference]:
    path = [{m.index: _wide(m.entries) for m in snap.members}]
    path += [stepped(snap, wide=True, steps=n) for n in range(1, STEPS + 1)]
    found = {}
    for m in snap.members:
        at = torch.stack([after[m.index] for after in path])
        changes = at.diff(dim=0).abs()
        changes = changes[changes.isfinite()]
        found[m.index] = _Reference(at[-1], at.abs().amax(0), float(changes.max()) if changes.numel() else 0.0)
    return found
