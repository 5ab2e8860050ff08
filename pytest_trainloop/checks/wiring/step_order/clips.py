"""Clips that clip nothing or the wrong tensors, that leave some out, and that run inside of windows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.step_order.causes import found
from pytest_trainloop.core.wording import module_of, share, some
from pytest_trainloop.instruments.records.clips import (
    bites,
    by_line,
    clips_by_site,
    groups_left_out,
    late,
    share_left_out,
)
from pytest_trainloop.instruments.records.gradient_ledger import limits
from pytest_trainloop.instruments.tracing.definitions import argument
from pytest_trainloop.instruments.tracing.statements import only_call

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.records.clips import GroupLeftOut
    from pytest_trainloop.instruments.records.gradient_ledger import Ledger, Window
    from pytest_trainloop.recording.events import ClipCall
    from pytest_trainloop.recording.record import Optimizer, Record


def clip_findings(ledger: Ledger) -> Iterator[Finding]:
    useless = list(useless_clips(ledger))
    yield from useless or left_out(ledger)


def useless_clips(ledger: Ledger) -> Iterator[Finding]:
    """Lines of which no call, of at least two, does anything, while what trains is covered by no other clip."""
    record, windows = ledger.record, ledger.windows
    lines = [calls for calls in by_line(record) if len(calls) >= 2 and all(map(limits, calls))]
    steps = Counter(i for w in windows for i in w.stepped)
    trained = {i for i, n in steps.items() if n >= 2}
    by_hand = record.moved_outside_steps()
    by_hand |= {i for e in ledger.entries if e.what in ("assigned", "altered") for i in e.tensors}
    too_late = {after[0].site for clips in clips_by_site(record) if (after := late(ledger, clips))}
    for calls in lines:
        used_up = calls[0].iterator is not None and {c.iterator for c in calls} == {calls[0].iterator}
        used_up = used_up and not any(c.given or c.others or c.idle for c in calls[1:])
        mine = calls[1:] if used_up and calls[0].given else calls
        given = {i for c in mine for i in c.given}
        stand_ins = {i for c in mine for i in c.stand_ins}
        if not used_up and (any(c.others for c in calls) or not all(_is_useless(ledger, c) for c in calls)):
            continue
        covered = _covered(ledger, calls, whole=used_up)
        free = trained - covered - by_hand
        idle = not given and all(c.idle for c in calls)
        if not used_up and (given or idle):
            known = [e for e in ledger.entries if e.what in ("arrived", "read", "cleared", "assigned", "altered")]
            if given & by_hand & set().union(*(e.tensors for e in known)):  # an average has no gradient, moved or not
                continue
            if (another := _another(ledger, calls, given, trained, free)) is not None:
                yield another
                continue
        if used_up:
            variant, unclipped = "used up", free
        elif given:
            variant, unclipped = "wiped" if any(c.found for c in calls) else "", given & trained
        elif idle:
            continue
        elif stand_ins:
            variant, unclipped = "stand-ins", stand_ins & trained
        else:  # an empty list, since no tensor has a gradient yet
            variant, unclipped = "", set() if any(any(c.norms.values()) for c in calls) else trained
        if not unclipped or not unclipped <= free or (given and not used_up and calls[0].site in too_late):
            continue
        if not variant and _after_zeroing(ledger, mine[0]):
            variant = "after zeroing"
        names = record.names(unclipped)
        facts: dict[str, Any] = {"calls": len(mine), "tensors": len(names)}
        facts["steps"] = sum(bool(w.stepped & unclipped) for w in windows)
        if used_up:
            line = str(mine[0].place)
            made = argument(line, mine[0].by, "parameters", 0)
            facts["change"] = (only_call(line, "filter") if made == line else "") or made
        elif variant == "stand-ins":
            facts["change"] = only_call(str(mine[0].place), "state_dict")
        yield _found("clips_nothing", mine[0], names, variant, **facts)


def _found(cause: str, call: ClipCall, names: Collection[str] = (), variant: str = "", **facts: Any) -> Finding:
    limit = "unknown" if math.isnan(call.limit) else f"{call.limit:g}"
    return found(cause, call, (call.by, *names), variant, by=call.by, limit=limit, **facts)


def _is_useless(ledger: Ledger, call: ClipCall) -> bool:
    """Whether it found no gradient, or none that anything uses before it is zeroed. What stands at the end of a run is
    taken as the rest is."""
    return all(_next(ledger, i, call.at) in ("cleared", "open") for i in call.found)


def _next(ledger: Ledger, tensor: int, at: int) -> str:
    """What becomes of the gradient of a tensor after some moment: "kept", "cleared", "used" or "open"."""
    entry = ledger.after(at, {tensor}, "arrived", "read", "cleared", "assigned", "altered")
    if entry is None:
        return "open"
    if entry.what == "arrived":
        residual = next((a.residual for a in entry.event.arrivals[tensor] if a.at > at), None)
        return "cleared" if residual is None or residual.zero else "kept"
    if entry.what == "read":
        grad = entry.event.reads[-1].grads.get(tensor)
        return "cleared" if grad is None or grad.zero else "used"
    return "cleared" if entry.what == "cleared" else "used"


def _covered(ledger: Ledger, calls: list[ClipCall], *, whole: bool) -> set[int]:
    """Tensors that a clip besides these calls, or the loop by hand, covered in such a way that a step used it."""
    mine = {id(call) for call in calls}
    covered: set[int] = set()
    for w in ledger.windows:
        covered |= w.covered - {i for c in w.clips for i in c.found}
        for c in w.clips:
            if id(c) not in mine:
                covered |= {i for i in c.found & w.stepped if whole or _next(ledger, i, c.at) != "cleared"}
    return covered


def _after_zeroing(ledger: Ledger, call: ClipCall) -> bool:
    before = [e for e in ledger.record.events if e.at < call.at and type(e) is not type(call)]
    zeroed = bool(before) and getattr(before[-1], "how", "") in ("none", "zero")
    return zeroed and any(p.at < call.at for p in ledger.passes)


def _another(
    ledger: Ledger, calls: list[ClipCall], given: set[int], trained: set[int], free: set[int]
) -> Finding | None:
    """Each call is followed by the step of an optimizer that holds none of the tensors, has its gradients at that
    moment, and is covered by no clip of the run."""
    record, windows = ledger.record, ledger.windows
    following = [next((w for w in windows if w.until > c.at and w.stepped), None) for c in calls]
    pairs = [(c, w) for c, w in zip(calls, following, strict=True) if w is not None]
    if None in following[:-1] or len(pairs) < 2 or len({w.optimizer for _, w in pairs}) != 1:
        return None
    optimizer = record.optimizers[pairs[0][1].optimizer]
    steps = [w for w in windows if w.optimizer == optimizer.index]
    mine = {i for w in steps for i in w.stepped}
    if given & set(optimizer.parameters) or not mine <= free:
        return None
    for call, window in pairs:  # the gradients stood there at the call, and none was added after it
        added = any(call.at < a.at < window.until for i in window.stepped for a in record.arrivals(i))
        if added or any(call.norms.get(i, 0.0) == 0.0 for i in window.stepped):
            return None
    twin = not given & trained
    handed = [*(record.parameters[i].shape for i in given), *calls[0].idle]
    if twin and (len(mine) < 2 or sorted(handed) != sorted(record.parameters[i].shape for i in mine)):
        return None
    useful = {c.site[:1] for w in windows for c in w.clips if c.found & given and not _is_useless(ledger, c)}
    clipped, names = record.names(given) or ("copies of the weights",), record.names(mine)
    of = module_of(names)
    return _found(
        "clips_another",
        calls[0],
        names,
        level="advice" if calls[0].site[:1] in useful else "fault",  # a function that several updates share
        whose=f"the {optimizer.kind} of {of}" if of else optimizer.kind,
        clipped=module_of(clipped) or some(clipped),
        unclipped=(of,) if of else names,
        calls=len(calls),
        steps=len(steps),
        shown_by=(
            f"what is clipped {'gets no gradient at all' if twin else 'is zeroed before a step uses it'}, and "
            "the step that follows each call uses other tensors"
        ),
        repair=f"give it the parameters that this {optimizer.kind} steps: {some(names)}",
    )


def left_out(ledger: Ledger) -> Iterator[Finding]:
    """By optimizer, where at least two of its steps were clipped."""
    record = ledger.record
    for optimizer in record.optimizers:
        clipped = [w for w in ledger.windows if w.optimizer == optimizer.index and w.clips]
        groups = groups_left_out(record, optimizer.index, clipped) if len(clipped) >= 2 else []
        if not groups:
            continue
        names = tuple(name for group in groups for name in group.names)
        part, call = share_left_out(clipped), clipped[0].clips[-1]
        facts: dict[str, Any] = {
            "kind": optimizer.kind,
            "steps": len(clipped),
            "parts": "; ".join(map(_group, groups)),
            "tensors": len(names),
            "share": share(part),
            "known": not math.isnan(part),
        }
        if _split_by_decay(record, optimizer, clipped, groups):
            yield _found("clips_one_group", call, names, **facts)
        else:
            repair = _also(record, call, names)
            yield _found("clip_leaves_out", call, names, level="advice", repair=repair, **facts)


def _group(group: GroupLeftOut) -> str:
    whole = f"all {group.tensors}" if group.whole and group.tensors > 1 else f"{group.tensors} of {group.of_tensors}"
    of = f"group {group.group} of {group.of_groups}, " if group.of_groups > 1 else ""
    norm = "" if math.isnan(group.norm) else f", |g| {group.norm:.2g}"
    return f"{of}{some(group.names)} ({whole} tensors{norm})"


def _also(record: Record, call: ClipCall, names: tuple[str, ...]) -> str:
    """The clip with the modules beside the model that hold what is left out."""
    outside = {name.partition(".")[0] for name in names}
    others = [p for p in record.parameters if p.name not in names and p.trainable]
    beside = {p.name.partition(".")[0] for p in others if p.role == "model"} == {"model"}
    beside = beside or all(p.role != "model" for p in record.parameters if p.name in names)
    if not beside or not all("." in name for name in names) or any(p.name.partition(".")[0] in outside for p in others):
        return ""
    modules = ", ".join(f"*{module}.parameters()" for module in sorted(outside))
    return f"{call.by}([*model.parameters(), {modules}], {call.limit:g})"


def _split_by_decay(record: Record, optimizer: Optimizer, clipped: list[Window], groups: list[GroupLeftOut]) -> bool:
    """Whether whole groups are left out that differ from those that are clipped in their weight decay only, and hold
    other kinds of tensors, or other tensors of the same modules: a split by part of the model may be meant."""
    left = {g.group for g in groups}
    group_of = dict(zip(optimizer.parameters, optimizer.groups, strict=False))
    taken = {group_of[i] for w in clipped for i in w.covered if i in group_of}
    if not all(g.whole for g in groups) or left & taken or not taken or not optimizer.from_torch:
        return False
    alike = all(len({w.step.lrs[g] for g in left | taken}) == 1 for w in clipped)
    alike = alike and len({optimizer.eps[g] for g in left | taken}) == 1
    if not alike or {g for g in left | taken if optimizer.weight_decays[g] == 0.0} not in (left, taken):
        return False
    mine, others = ([p for p in record.parameters if group_of.get(p.index) in side] for side in (left, taken))
    vectors = [{len(p.shape) < 2 for p in side} for side in (mine, others)]
    owners = {p.owner for p in others if p.owner}
    beside = sum(p.owner in owners for p in mine)
    return vectors in ([{True}, {False}], [{False}, {True}]) or 2 * beside >= len(mine) > 0


def inside_windows(ledger: Ledger, *, bite: bool) -> Iterator[Finding]:
    """Lines that clip the same gradients again after another batch was added to them, at least twice; without ``bite``
    those that change nothing here, as ``accumulation_equivalence`` shows what the others do."""
    for calls in by_line(ledger.record):
        inner = [a for a, b in itertools.pairwise(calls) if limits(a) and _goes_on(ledger, a, b)]
        biting = sum(map(bites, inner))
        if len(inner) >= 2 and (bite or not biting):
            facts: dict[str, Any] = {"inner": len(inner), "calls": len(calls), "bites": biting}
            yield _found("clip_inside_window", inner[0], level="advice", **facts)


def _goes_on(ledger: Ledger, call: ClipCall, following: ClipCall) -> bool:
    """Whether between two calls nothing but a backward pass of another batch touched the gradients, and added to
    them."""
    mine = call.found & following.found
    added = ledger.between(call.at, following.at, mine, "arrived")
    residuals = [a.residual for e in added for i in mine & e.tensors for a in e.event.arrivals[i]]
    before = ledger.before(call.at, mine, "arrived")
    if not added or before is None or any(r is None or r.zero for r in residuals):
        return False
    read = ledger.between(call.at, following.at, mine, "read")
    return not read and all(e.event.item > before.event.item for e in added)
