"""The fused, foreach and for-loop variants of one step, each against the for-loop one in float64.

A step rounds at most some thirty times on the way to an entry, each time by at most half an eps of p, of the update or,
where terms cancel (g + decay * p), of what goes in. ``ROUNDINGS`` eps of the first two, and as many times what an eps
on p, g or the state makes of the result, bound what a right variant may be off by. Two steps are made: in the second,
the state counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.replay import REFUSED, WIDE, Group, Member, Snapshot, entrywise, stepped

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIANTS: dict[str, dict[str, Any]] = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}

STEPS = 2

ROUNDINGS = 32


@dataclass(frozen=True, slots=True)
class Apart:
    """A variant that is off: by how much at the worst entry, against the largest update of that tensor and against what
    rounding allows. ``in_use`` is whether the loop uses it, ``agreeing`` which variants are right on the same tensor in
    the same dtype."""

    kind: str
    variant: str
    index: int
    dtype: str
    off: float
    update: float
    allowed: float
    in_use: bool
    agreeing: tuple[str, ...]
    peaks: dict[str, int] = field(default_factory=dict)


def apart(snap: Snapshot) -> Iterator[Apart]:
    """For each variant that is off, the tensor where it is off by most; first in float64, then as the parameters
    are. Nothing where the optimizer cannot be built again."""
    peaks: dict[str, int] = {}
    try:
        right = _reference(snap)
    except REFUSED:
        return
    low = any(m.entries.dtype not in (torch.float64, torch.complex128) for m in snap.members)
    for wide in (True, False) if low else (True,):
        made = {name: got for name in _known(snap) if (got := _made(snap, name, wide, peaks)) is not None}
        off = {name: _all_off(snap, right, got, {}) for name, got in made.items()}
        if any(size > allowed for found in off.values() for size, allowed in found.values()):
            sway = _sway(snap, right, wide)
            off = {name: _all_off(snap, right, got, sway) for name, got in made.items()}
        for name, found in off.items():
            index = max(found, key=lambda i: found[i][0] / found[i][1])
            size, allowed = found[index]
            if size > allowed:
                yield Apart(
                    *(snap.kind.__name__, name, index, str(made[name][index].dtype).removeprefix("torch.")),
                    *(size, right[index].update, allowed, name == in_use(snap, index)),
                    agreeing=tuple(other for other in made if off[other][index][0] <= off[other][index][1]),
                    peaks=peaks,
                )


def _all_off(
    snap: Snapshot, right: dict[int, _Right], got: dict[int, torch.Tensor], sway: dict[int, torch.Tensor]
) -> dict[int, tuple[float, float]]:
    return {m.index: _off(right[m.index], got[m.index], sway.get(m.index)) for m in snap.members}


def _sway(snap: Snapshot, right: dict[int, _Right], wide: bool) -> dict[int, torch.Tensor]:
    """By how much the reference changes, entry by entry, if what goes in is an eps larger: p, g, and the state."""
    total = {index: torch.zeros_like(one.reach) for index, one in right.items()}
    for part in ("entries", "grad", "state"):
        other = stepped(_swayed(snap, right, part, wide), wide=True, steps=STEPS)
        for index, moved in other.items():
            total[index] += (moved - right[index].after).abs().nan_to_num(0.0, 0.0)
    return total


def _swayed(snap: Snapshot, right: dict[int, _Right], part: str, wide: bool) -> Snapshot:
    """The copies with one of the three an eps larger; p by an eps of the largest that it gets."""

    def member(m: Member) -> Member:
        eps = torch.finfo(torch.float64 if wide else m.entries.dtype).eps
        if part == "state":
            return replace(m, state={k: _wide(v) * (1.0 + eps) if entrywise(k, v) else v for k, v in m.state.items()})
        if part == "grad":
            return replace(m, grad=_wide(m.grad) * (1.0 + eps))
        entries = _wide(m.entries)
        return replace(m, entries=entries + eps * right[m.index].reach)

    return Snapshot(snap.kind, tuple(Group(g.options, tuple(map(member, g.members))) for g in snap.groups))


def in_use(snap: Snapshot, index: int) -> str:
    """The variant that the loop's own optimizer makes for a parameter: foreach wherever it is not on a CPU, unless
    told."""
    group = next(g for g in snap.groups if any(m.index == index for m in g.members))
    options, (member, *_) = group.options, group.members
    if options.get("fused"):
        return "fused"
    unless_told = member.entries.device.type != "cpu" and not options.get("differentiable")
    return "foreach" if options.get("foreach", None) or (options.get("foreach") is None and unless_told) else "for-loop"


def _known(snap: Snapshot) -> list[str]:
    return [name for name in VARIANTS if name == "for-loop" or all(name in g.options for g in snap.groups)]


def _made(snap: Snapshot, name: str, wide: bool, peaks: dict[str, int]) -> dict[int, torch.Tensor] | None:
    """The steps of one variant; None where it does not take these tensors or options."""
    device = snap.members[0].entries.device
    try:
        if device.type != "cuda":
            return stepped(snap, wide=wide, steps=STEPS, **VARIANTS[name])
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        got = stepped(snap, wide=wide, steps=STEPS, **VARIANTS[name])
        peaks[name] = torch.cuda.max_memory_allocated(device) - before
    except REFUSED:
        return None
    return got


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(WIDE.get(tensor.dtype, tensor.dtype))


def _off(right: _Right, got: torch.Tensor, sway: torch.Tensor | None) -> tuple[float, float]:
    """The largest distance of an entry to the right one, and what rounding allows there."""
    info = torch.finfo(got.dtype)
    finite = right.after.isfinite()
    if not bool(finite.any()):
        return 0.0, 1.0
    allowed = ROUNDINGS * info.eps * (right.reach + right.update + info.tiny)
    allowed = allowed if sway is None else allowed + ROUNDINGS * sway
    off = (got.to(right.after.dtype) - right.after).abs().nan_to_num(math.inf, math.inf)
    worst = int((off / allowed).nan_to_num(0.0, math.inf)[finite].argmax())
    return float(off[finite][worst]), float(allowed[finite][worst])


@dataclass(frozen=True, slots=True)
class _Right:
    """The reference of one parameter: its entries after the steps, the largest size that each had on the way, and the
    largest change of one in a step."""

    after: torch.Tensor
    reach: torch.Tensor
    update: float


def _reference(snap: Snapshot) -> dict[int, _Right]:
    path = [{m.index: _wide(m.entries) for m in snap.members}]
    path += [stepped(snap, wide=True, steps=n) for n in range(1, STEPS + 1)]
    found = {}
    for m in snap.members:
        at = torch.stack([after[m.index] for after in path])
        steps = at.diff(dim=0).abs()
        found[m.index] = _Right(at[-1], at.abs().amax(0), _largest(steps[steps.isfinite()]))
    return found


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
