"""First steps repeated on copies: without gradients, and by the variants of torch's step.

A step rounds at most some thirty times on the way to an entry, each time by at most half an eps of p, of the update or,
where terms cancel (g + decay * p), of its inputs. ``ROUNDINGS`` eps of the first two, and ``ROUNDINGS`` times what an
eps on p, g or the state makes of the result, bound the error of a right variant. Two steps are made: in the second, the
state counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.checks.numerics.optimizer_numerics.causes import found
from pytest_trainloop.checks.numerics.optimizer_numerics.watched_steps import named
from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.core.wording import be
from pytest_trainloop.instruments.optimizers.replay import (
    REFUSED,
    WIDE,
    Group,
    Member,
    Snapshot,
    entrywise,
    rebuilt,
    step,
    stepped,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.checks.numerics.optimizer_numerics.watched_steps import FirstSteps
    from pytest_trainloop.core.finding import Finding

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam")

LONG = 300
"""Steps without a gradient."""

GROWN = 10.0
"""Size of a step without a gradient, relative to the last one with, from which growth counts as unbounded."""

VARIANTS: dict[str, dict[str, Any]] = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}

REPEATED_STEPS = 2

ROUNDINGS = 32


def growing_steps(first: FirstSteps, line: str) -> Iterator[Finding]:
    """Betas under which steps grow where gradients vanish: the second moment decays faster than the first."""
    for snap in (start.snap for start in first.found.values()):
        for group in snap.groups if snap.kind.__name__ in ADAMS else ():
            given: Any = group.options.get("betas")
            # under amsgrad the second moment never falls (odd: amsgrad_with_a_long_first_moment)
            if not group.members or not given or group.options.get("amsgrad"):
                continue
            b1, b2 = float(given[0]), float(given[1])
            if b1 <= math.sqrt(b2):
                continue
            try:
                by, after = _largest_step(snap, group)
            except REFUSED as error:
                reraise_raised(error)
                continue
            if by > 1.0:  # else they only shrink slowly (odd: first_beta_a_little_above_the_second)
                ratio = b1 / math.sqrt(b2) if b2 > 0.0 else math.inf
                # the weaker condition of Adam's own theorem
                level = "fault" if b1 * ratio >= 1.0 and by >= GROWN else "advice"
                facts = {"b1": b1, "b2": b2, "kind": snap.kind.__name__, "ratio": ratio, "by": by, "after": after}
                facts |= {"level": level, "repair": f"betas=({min(b1, b2):g}, {max(b1, b2):g})"}
                yield found("betas_swapped", line, first.record.names(m.index for m in group.members), **facts)


def _largest_step(snap: Snapshot, group: Group) -> tuple[float, int]:
    """Of one step on the gradients as they are and many on gradients of zero, in float64 without weight decay: the
    largest of the latter relative to the former, and its number."""
    member = max(group.members, key=lambda m: float(m.grad.abs().max()))
    alone = Snapshot(snap.kind, (Group({**group.options, "weight_decay": 0.0}, (member,)),))
    fresh, held = rebuilt(alone, wide=True)
    p = held[member.index]
    sizes: list[float] = []
    for _ in range(LONG + 1):
        before = p.detach().clone()
        step(fresh)
        sizes.append(float((p.detach() - before).abs().max()))
        p.grad = torch.zeros_like(p)
    first, rest = sizes[0], sizes[1:]
    after = max(range(LONG), key=lambda k: rest[k])
    return (rest[after] / first if first > 0.0 and math.isfinite(first) else 0.0), after + 1


class Reference(NamedTuple):
    """The steps of one parameter by the for-loop variant in float64."""

    after: torch.Tensor
    size: torch.Tensor
    """Largest absolute value of each entry on the way."""
    update: float
    """Largest change of an entry in one step."""


def wrong_variants(first: FirstSteps, line: str) -> Iterator[Finding]:
    """Variants of the step that are farther from the reference than rounding allows: of each the worst tensor, first in
    float64, then in the dtype of the parameters. Those that are wrong in one dtype are one finding."""
    for snap in (start.snap for start in first.found.values()):
        peaks: dict[str, int] = {}
        wrong: dict[str, list[dict[str, Any]]] = {}
        try:
            references = _references(snap)
        except REFUSED as refusal:
            reraise_raised(refusal)
            continue
        low = any(m.entries.dtype not in (torch.float64, torch.complex128) for m in snap.members)
        known = [name for name in VARIANTS if name == "for-loop" or all(name in g.options for g in snap.groups)]
        for wide in (True, False) if low else (True,):
            made = {name: got for name in known if (got := _made(snap, name, wide, peaks)) is not None}
            errors = {name: _errors(references, got, {}) for name, got in made.items()}
            if any(error > allowed for of_one in errors.values() for error, allowed in of_one.values()):
                sensitivity = _sensitivity(snap, references, wide)
                errors = {name: _errors(references, got, sensitivity) for name, got in made.items()}
            for name, of_one in errors.items():
                index = max(of_one, key=lambda i: of_one[i][0] / of_one[i][1])
                error, allowed = of_one[index]
                if error > allowed:
                    right = [other for other, e in errors.items() if e[index][0] <= e[index][1]]
                    facts: dict[str, Any] = {"step": name, "in_use": name == in_use(snap, index), "right": right}
                    facts |= {"index": index, "error": error, "allowed": allowed, "update": references[index].update}
                    wrong.setdefault(named(made[name][index].dtype), []).append(facts)
        for dtype, of_dtype in wrong.items():
            names = dict.fromkeys(first.record.name(facts["index"]) for facts in of_dtype)
            # the one that the loop uses before all others
            facts = max(of_dtype, key=lambda f: (f["in_use"], f["error"] / f["update"] if f["update"] else 0.0))
            right, used, error = facts["right"], facts["in_use"], facts["error"]
            far = facts["step"] == "fused" and error >= facts["update"] / 2
            fault = used and far and "for-loop" in right
            if right:
                flag = "foreach=False, fused=False" if right[0] == "for-loop" else f"{right[0]}=True"
                facts["repair"] = f"use the {right[0]} step ({flag})" if used else f"stay with {right[0]}"
                facts["right"] = f"{' and '.join(right)} {be(right)}"
            facts |= {"level": "fault" if fault else "advice", "finite": math.isfinite(error)}
            facts |= {"kind": snap.kind.__name__, "dtype": dtype, "tensor": first.record.name(facts["index"])}
            facts["every"] = " and ".join(f["step"] for f in sorted(of_dtype, key=lambda f: not f["in_use"]))
            facts["peaks"] = ", ".join(f"{variant} {size / 2**20:.1f} MiB" for variant, size in peaks.items())
            yield found("variants_differ", line, names, **facts)


def in_use(snap: Snapshot, index: int) -> str:
    """The variant that the loop's own optimizer uses for a parameter: by default foreach on any device but a CPU."""
    group = next(g for g in snap.groups if any(m.index == index for m in g.members))
    asked, device = group.options.get("foreach"), group.members[0].entries.device
    if group.options.get("fused"):
        return "fused"
    default = device.type != "cpu" and not group.options.get("differentiable")
    return "foreach" if asked or (asked is None and default) else "for-loop"


def _references(snap: Snapshot) -> dict[int, Reference]:
    path = [{m.index: _wide(m.entries) for m in snap.members}]
    path += [stepped(snap, wide=True, steps=n) for n in range(1, REPEATED_STEPS + 1)]
    references = {}
    for m in snap.members:
        at = torch.stack([after[m.index] for after in path])
        changes = at.diff(dim=0).abs()
        changes = changes[changes.isfinite()]
        references[m.index] = Reference(at[-1], at.abs().amax(0), float(changes.max()) if changes.numel() else 0.0)
    return references


def _made(snap: Snapshot, name: str, wide: bool, peaks: dict[str, int]) -> dict[int, torch.Tensor] | None:
    """The entries after the steps of one variant, and on a GPU its peak memory in bytes; None where it does not accept
    these tensors or options."""
    device = snap.members[0].entries.device
    try:
        if device.type != "cuda":
            return stepped(snap, wide=wide, steps=REPEATED_STEPS, **VARIANTS[name])
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        got = stepped(snap, wide=wide, steps=REPEATED_STEPS, **VARIANTS[name])
        peaks[name] = torch.cuda.max_memory_allocated(device) - before
    except REFUSED as error:
        reraise_raised(error)
        return None
    return got


def _errors(
    references: Mapping[int, Reference], got: Mapping[int, torch.Tensor], sensitivity: Mapping[int, torch.Tensor]
) -> dict[int, tuple[float, float]]:
    """By parameter, the error of the worst entry, and what rounding allows there."""
    errors = {}
    for index, reference in references.items():
        info, finite = torch.finfo(got[index].dtype), reference.after.isfinite()
        if not bool(finite.any()):
            errors[index] = 0.0, 1.0
            continue
        allowed = ROUNDINGS * info.eps * (reference.size + reference.update + info.tiny)
        allowed = allowed + ROUNDINGS * sensitivity[index] if sensitivity else allowed
        size = (got[index].to(reference.after.dtype) - reference.after).abs().nan_to_num(math.inf, math.inf)
        worst = int((size / allowed).nan_to_num(0.0, math.inf)[finite].argmax())
        errors[index] = float(size[finite][worst]), float(allowed[finite][worst])
    return errors


def _sensitivity(snap: Snapshot, references: Mapping[int, Reference], wide: bool) -> dict[int, torch.Tensor]:
    """By how much the reference changes, entry by entry, if p, g and the state are an eps larger, one after another; p
    by an eps of the largest value that it takes."""

    def larger(m: Member, what: str) -> Member:
        eps = torch.finfo(torch.float64 if wide else m.entries.dtype).eps
        if what == "state":
            return replace(m, state={k: _wide(v) * (1.0 + eps) if entrywise(k, v) else v for k, v in m.state.items()})
        if what == "grad":
            return replace(m, grad=_wide(m.grad) * (1.0 + eps))
        return replace(m, entries=_wide(m.entries) + eps * references[m.index].size)

    total = {index: torch.zeros_like(reference.size) for index, reference in references.items()}
    for what in ("entries", "grad", "state"):
        groups = (Group(g.options, tuple(larger(m, what) for m in g.members)) for g in snap.groups)
        for index, moved in stepped(Snapshot(snap.kind, tuple(groups)), wide=True, steps=REPEATED_STEPS).items():
            total[index] += (moved - references[index].after).abs().nan_to_num(0.0, 0.0)
    return total


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(WIDE.get(tensor.dtype, tensor.dtype))
