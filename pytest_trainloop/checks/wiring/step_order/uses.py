"""What each step uses: nothing, what was used before, or what an older forward pass made; and calls in a wrong order.

Each rule yields findings with the optimizers that they are about: the first fault of an optimizer stands for all.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.consequences import LEARNING, TRAINING
from pytest_trainloop.checks.wiring.step_order.causes import found
from pytest_trainloop.checks.wiring.step_order.further import (
    ACCUMULATE,
    condition_of,
    many_batches,
    may_step_later,
    stops_from_other_weights,
)
from pytest_trainloop.core.errors import Refused
from pytest_trainloop.instruments.records.clips import clips_by_site, late
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.instruments.tracing.statements import call_of_helper, flag_set, in_a_loop_of_its_own
from pytest_trainloop.recording.events import GradWrite, ScalerCall, SchedulerStep, Step
from pytest_trainloop.runs.further_runs import longer_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.records.gradient_ledger import Pass, Use
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

    About = Iterator[tuple[set[int], Finding]]


def gradient_use(evidence: Evidence, ledger: Ledger) -> Iterator[Finding]:
    judged: set[int] = set()
    for rule in (no_backward, no_step, empty_steps, late_passes, refused_pass, added_again, used_again, stopped, kept):
        for optimizers, finding in rule(evidence, ledger):
            if not judged & optimizers:
                yield finding
            judged |= optimizers
    for optimizers, finding in another_loss_kept(ledger):
        if not judged & optimizers:
            yield finding


def no_backward(_evidence: Evidence, ledger: Ledger) -> About:
    record, steps = ledger.record, [w.step for w in ledger.windows]
    moved = record.autograd_passes() or ledger.assigned or record.moved_outside_steps() or record.changed()
    if len(steps) >= 2 and all(w.empty for w in ledger.windows) and not moved and record.raised is None:
        call = {"culprits": ("loss.backward()",), "kinds": ("missing call",)}
        yield {s.optimizer for s in steps}, found("backward_missing", steps[0], steps=len(steps), **call)


def no_step(evidence: Evidence, ledger: Ledger) -> About:
    """Optimizers that never step although backward passes bring gradients for them again and again."""
    record = ledger.record
    scaler = {c.what for c in record.scaler_calls()}
    if record.raised is not None or "step" in scaler:
        return
    by_hand = record.moved_outside_steps() | record.changed() | ledger.assigned
    stepped = {i for o in record.optimizers if o.steps for i in o.parameters}
    for optimizer in record.optimizers:
        mine = set(optimizer.parameters) - stepped
        reached = [p for p in ledger.passes if p.backward.reached and mine & set(p.backward.arrivals)]
        lost = [p for p in reached if not mine & p.used]
        if optimizer.steps or len(lost) < 2 or mine & by_hand or (record.steps and len(lost) < record.rounds // 2):
            continue
        if any(p.used for p in lost):  # it trains next to others, and may wait for its turn
            if not all(mine & p.cleared for p in lost[:-1]) or may_step_later(record):
                continue
            if not evidence.repeatable and record.cut_short:
                continue  # what was ended from outside shows no more than a beginning
            later = evidence.shared(longer_run).optimizers if evidence.repeatable else record.optimizers
            if optimizer.index >= len(later) or later[optimizer.index].steps:
                continue
        first, names = lost[0].backward, record.names(mine)
        facts: dict[str, Any] = {"passes": len(lost), "kind": optimizer.kind}
        if (onto := sum(_onto_nonfinite(p, mine) for p in lost)) >= 2:
            facts |= {"onto": onto, "explains": (*TRAINING, "grad_scaler")}
            yield {optimizer.index}, found("not_zeroed", first, ("zero_grad()", *names), "not finite", **facts)
        else:
            yield {optimizer.index}, _step_missing(first, names, "scaled" if "scale" in scaler else "", **facts)


LEFT = 64
"""Backward passes in a row without a step, after which no step is still to come. Windows that grow to twice their size
(1, 2, 4, ...) leave as many as their last step used: hence also ``LEFT_WINDOWS``."""

LEFT_WINDOWS = 8


def stopped(evidence: Evidence, ledger: Ledger) -> About:
    """Optimizers that step for a while and then never again, while backward passes go on to bring gradients for them.

    A fault where the loop stops after as many steps from other weights, whose losses differ: an early stop, which
    waits for the loss, is advice (odd: early_stop_without_break)."""
    record = ledger.record
    for optimizer in record.optimizers:
        if not _without_steps(ledger, optimizer.index, 4, 2) or not evidence.repeatable:
            continue
        longer = Ledger(evidence.shared(many_batches))
        left = _without_steps(longer, optimizer.index, LEFT, LEFT_WINDOWS)
        steps = [w.step for w in longer.windows if w.optimizer == optimizer.index]
        if not left or len(steps) != optimizer.steps:
            continue
        condition = condition_of(steps[-1].place)
        facts = {"steps": len(steps), "passes": len(left), "kind": optimizer.kind}
        facts |= {"change": flag_set(condition) or condition} if condition else {}
        if not stops_from_other_weights(evidence, optimizer.index, len(steps)):
            facts["level"] = "advice"
        names = record.names(set(optimizer.parameters))
        yield {optimizer.index}, _step_missing(left[0].backward, names, "stops", **facts)


def _without_steps(ledger: Ledger, index: int, least: int, windows: int) -> list[Pass]:
    """The backward passes after the last step of an optimizer that bring gradients for it, where they are so many, and
    as many as so many of its windows; none where something else uses these gradients."""
    record, mine = ledger.record, set(ledger.record.optimizers[index].parameters)
    own = [w for w in ledger.windows if w.optimizer == index]
    by_hand = record.moved_outside_steps() | ledger.assigned
    if record.raised is not None or not own or mine & by_hand or len(own) != record.optimizers[index].steps:
        return []
    # a scaler leaves steps out that are not finite
    last = max(own[-1].step.at, *(c.at for c in record.scaler_calls() if c.what == "step"), 0)
    left = [p for p in ledger.passes if p.at > last and p.backward.reached and mine & set(p.backward.arrivals)]
    enough = len(left) >= max(least, windows * max(len(w.passes) for w in own))
    # another optimizer steps the same parameters (odd: one_optimizer_after_the_other)
    return left if enough and not any(mine & p.used for p in left) else []


def never_steps_with(evidence: Evidence, ledger: Ledger) -> Iterator[Finding]:
    """A value of the knob ``accumulate`` with which no step is made, although the loop steps with its own value: the
    condition of the step is turned round, or counts something else."""
    by_default = ledger.record
    if "accumulate" not in evidence.knobs or not by_default.steps or not ledger.windows:
        return
    accumulates = max(len(w.passes) for w in ledger.windows) > 1
    for size in (1, ACCUMULATE) if accumulates else (ACCUMULATE,):
        try:
            record = evidence.run(accumulate=size)
        except Refused:
            continue
        passes = [b for b in record.backwards() if b.reached]
        tried = record.steps or record.scaler_calls() or record.raised is not None
        if tried or len(passes) < LEFT * size or record.moved_outside_steps() or record.changed():
            continue
        step = ledger.windows[0].step
        condition = condition_of(step.place)
        facts = {"size": size, "passes": len(passes), "steps": by_default.steps, "change": condition or str(step.place)}
        names = record.names({i for b in passes for i in b.arrivals})
        yield _step_missing(passes[0], names, "by the knob", kind="", **facts)
        return


def _step_missing(at: object, names: tuple[str, ...], variant: str, **facts: object) -> Finding:
    call = "scaler.step(optimizer)" if variant in ("scaled", "refused") else "optimizer.step()"
    kinds = ("missing call", *["parameter"] * len(names))
    return found("step_missing", at, (call, *names), variant, kinds=kinds, **facts)


def _onto_nonfinite(one: Pass, tensors: set[int]) -> bool:
    arrived = [a for i in tensors for a in one.backward.arrivals.get(i, ())]
    return any(a.incoming.finite and a.residual is not None and not a.residual.finite for a in arrived)


def empty_steps(_evidence: Evidence, ledger: Ledger) -> About:
    """Most steps find no gradient, although backward passes brought some: these were cleared, or come too late."""
    record = ledger.record
    for optimizer in record.optimizers:
        mine = set(optimizer.parameters)
        steps = [w.step for w in ledger.windows if w.optimizer == optimizer.index]
        empty = [w.step for w in ledger.windows if w.optimizer == optimizer.index and w.empty]
        lost = [p for p in ledger.passes if mine & p.cleared and not mine & p.used]
        lost = [p for p in lost if p.finite(mine)]  # a gradient that is not finite may be dropped on purpose
        if len(empty) < 2 or 2 * len(empty) < len(steps) or len(lost) < 2 or mine & ledger.assigned:
            continue
        first = lost[0].backward
        names = record.names(set().union(*(mine & p.cleared for p in lost)))
        facts: dict[str, Any] = {"empty": len(empty), "steps": len(steps), "lost": len(lost)}
        clearing = ledger.after(first.at, mine, "cleared")
        until = clearing.at if clearing else math.inf
        zeros = next((s for s in empty if first.until < s.at < until), None)
        if zeros is not None:
            writes = ledger.between(first.at, zeros.at, mine, "cleared", "assigned", "altered", "clipped")
            write = writes[-1].event if writes else None
            by, at = f"{write.by}()" if write and write.by else "a hook on the gradients", write or zeros
            facts["change"] = call_of_helper(at.site, first.site)
            yield {optimizer.index}, found("zeroed_before_step", at, (by, *names), "zeros", by=by, **facts)
        elif steps[0].at < first.at:
            culprits = ("optimizer.step()", *names)
            yield {optimizer.index}, found("step_before_backward", steps[0], culprits, "empty", **facts)
        else:
            by, at = (clearing.event.by, clearing.event) if clearing else ("", first)
            culprits = (by or "zero_grad()", *names)
            facts["change"] = call_of_helper(at.site, first.site)
            yield {optimizer.index}, found("zeroed_before_step", at, culprits, by=by or "zeroing", **facts)


def late_passes(_evidence: Evidence, ledger: Ledger) -> About:
    """Backward passes whose forward pass lies before the last step on the same parameters."""
    record, every = ledger.record, Counter[int]()
    behind: dict[int, list[Pass]] = defaultdict(list)
    for p in ledger.passes:
        every.update({o for i in p.used for o in record.held.get(i, ())})
        old = {i for i in p.used if any(a.steps_since_forward > 0 for a in p.backward.arrivals[i])}
        for o in {o for i in old for o in record.held.get(i, ())} if 2 * len(old) >= len(p.used) else ():
            behind[o].append(p)
    for index, passes in behind.items():
        steps = [w.step for w in ledger.windows if w.optimizer == index and not w.step.in_backward]
        if len(passes) >= 2 and 2 * len(passes) >= every[index] and steps:
            step = next((s for s in reversed(steps) if s.at < passes[0].at), steps[0])
            culprits = ("optimizer.step()", *record.names({i for p in passes for i in p.used}))
            yield {index}, found("step_before_backward", step, culprits, late=len(passes), passes=every[index])


def refused_pass(_evidence: Evidence, ledger: Ledger) -> About:
    record = ledger.record
    if record.raised is None or "modified by an inplace operation" not in record.raised.message or not ledger.passes:
        return
    until = ledger.passes[-1].at
    forwards = [f.at for f in record.root_forwards() if f.at < until]
    steps = [s for s in record.innermost_steps() if s.at < until]
    between = [s for s in steps if s.at > max(forwards, default=0)]
    if not between and ledger.passes[-1].backward.item == 1:
        # nothing is left of an earlier batch: one of these forward passes was before
        changed = _shape_in(record.raised.message)
        between = [s for s in steps if s.at > min(forwards, default=s.at) and _holds(record, s, changed)]
    if between:
        culprits = ("optimizer.step()", *record.names(record.optimizers[between[0].optimizer].parameters))
        facts = {"steps": len(between), "raised": record.raised.summary[:120]}
        yield {s.optimizer for s in between}, found("step_before_backward", between[0], culprits, "refused", **facts)


def _shape_in(message: str) -> list[int]:
    """The sizes of the tensor that torch found changed, in order of size: it may have saved a transposed view."""
    shape = re.search(r"\[torch\.\w+ \[([\d, ]*)\]\]", message)
    return sorted(int(n) for n in shape[1].split(",") if n.strip()) if shape else []


def _holds(record: Record, step: Step, sizes: list[int]) -> bool:
    """Whether the step changes a parameter of these sizes."""
    return any(sorted(record.parameters[i].shape) == sizes for i in record.optimizers[step.optimizer].parameters)


def _by_backward(ledger: Ledger) -> Iterator[Use]:
    """Uses of what was used before. User code answers for a gradient that it assigned, and ``frozen_stays_frozen`` for
    one that is left of a parameter's training before it was frozen."""
    for use in ledger.uses:
        if use.again is not None and use.tensor not in ledger.assigned and use.tensor not in use.step.frozen:
            yield use


def added_again(evidence: Evidence, ledger: Ledger) -> About:
    record = ledger.record
    again: dict[int, dict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
    used_by: dict[int, set[int]] = defaultdict(set)
    for use in _by_backward(ledger):
        if not use.repeated and use.again is not None:
            again[use.step.optimizer][use.tensor].append(use.step)
            used_by[use.step.optimizer].add(use.again.optimizer)
    for index, by_tensor in again.items():
        by_tensor = {i: steps for i, steps in by_tensor.items() if len(steps) >= 2}
        if not by_tensor:
            continue
        first = next(iter(by_tensor.values()))
        facts: dict[str, Any]
        if index not in used_by[index] and used_by[index].isdisjoint(again):
            # the step of another optimizer comes between, and what that one uses is zeroed
            other = min(used_by[index])
            facts = {"steps": max(map(len, by_tensor.values())), "by": _kinds(record, (other, index))}
            facts["change"] = evidence.shared(MadeAt.of).group(index)
            yield {index, other}, found("two_optimizers", first[0], record.names(by_tensor), "added", **facts)
            continue
        wrong = _cleared_elsewhere(ledger, set(by_tensor), index, first[-1].at)
        facts = {
            "again": max(len({s.at for s in steps}) for steps in by_tensor.values()),
            "steps": sum(w.optimizer == index for w in ledger.windows),
        }
        lines = [[p.backward.site for p in w.passes] for w in ledger.windows if w.optimizer == index]
        accumulates = any(len(set(sites)) < len(sites) for sites in lines)
        before = [p.backward.place for p in ledger.passes if p.at < first[0].at]
        accumulates |= bool(before) and in_a_loop_of_its_own(str(before[-1]), str(first[0].place))
        if first[0].in_backward or accumulates:  # a hook steps, and zeroes; or backward() runs inside a window
            facts |= {"change": str(first[0].place), "repair": "optimizer.zero_grad() right after this line"}
        cause, at = ("wrong_object_zeroed", wrong) if wrong else ("not_zeroed", first[0])
        yield {index}, found(cause, at, record.names(by_tensor), **facts)


def _cleared_elsewhere(ledger: Ledger, tensors: set[int], optimizer: int, until: int) -> GradWrite | None:
    """A ``zero_grad()`` between steps that clears others than these: others of the same optimizer, or what no optimizer
    steps, or called on more lines than there are other optimizers. None where one clears these."""
    record = ledger.record
    since = min((s.at for s in record.of(Step)), default=0)
    calls = [w for w in record.of(GradWrite) if w.by == "zero_grad" and since < w.at < until]
    if any(tensors & set(w.parameters) for w in calls):
        return None
    if partly := [w for w in calls if set(w.parameters) & set(record.optimizers[optimizer].parameters)]:
        return partly[-1]

    def stepping(write: GradWrite) -> set[int]:
        return {o for i in write.parameters for o in record.held.get(i, ()) if record.optimizers[o].steps}

    lines = list({w.site: w for w in calls}.values())
    if unstepped := [w for w in lines if not stepping(w)]:
        return unstepped[-1]
    return lines[-1] if len(lines) > len(set().union(*map(stepping, calls))) else None


def used_again(_evidence: Evidence, ledger: Ledger) -> About:
    record = ledger.record
    pairs: dict[tuple[int, int], list[Use]] = defaultdict(list)
    for use in _by_backward(ledger):
        if use.repeated and use.again is not None:
            pairs[use.again.optimizer, use.step.optimizer].append(use)
    for pair, uses in pairs.items():
        if (steps := len({u.step.at for u in uses})) >= 2:
            cause = "stepped_twice" if len(set(pair)) == 1 else "two_optimizers"
            names = record.names({u.tensor for u in uses})
            yield set(pair), found(cause, uses[0].step, names, steps=steps, by=_kinds(record, pair))


def _kinds(record: Record, optimizers: tuple[int, int]) -> str:
    return " and ".join(record.optimizers[o].kind for o in optimizers)


def kept(_evidence: Evidence, ledger: Ledger) -> About:
    """Three steps and more use one gradient that was assigned, while passes bring others to other tensors, as to the
    weights that these are float32 masters of."""
    record = ledger.record
    again: dict[int, dict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for use in ledger.uses:
        if use.repeated and use.again is not None and use.tensor in ledger.assigned:
            since, until = use.again.at, use.step.at
            written = ledger.between(since, until, {use.tensor}, "cleared", "assigned", "altered", "clipped")
            before = [p for p in ledger.passes if p.at < since]
            between = [p for p in ledger.passes if since < p.at < until]
            if not written and before and between and _differ(before[-1], between[-1]):
                again[use.step.optimizer][use.tensor].append(use.step)
    for index, by_tensor in again.items():
        by_tensor = {i: steps for i, steps in by_tensor.items() if len(steps) >= 3}
        if by_tensor:
            assigned = [w for w in record.of(GradWrite) if w.assigns and set(w.parameters) & set(by_tensor)]
            at = assigned[0] if assigned else next(iter(by_tensor.values()))[0]
            yield {index}, found("gradient_kept", at, record.names(by_tensor), steps=max(map(len, by_tensor.values())))


def _differ(one: Pass, other: Pass) -> bool:
    return any(
        not a.incoming.same(b.incoming)
        for index, arrived in one.backward.arrivals.items()
        for a, b in zip(arrived, other.backward.arrivals.get(index, ()), strict=False)
    )


def call_order(ledger: Ledger) -> Iterator[Finding]:
    """Clips, schedulers and scalers that are called before or after the step that they belong to."""
    record = ledger.record
    lines = [(clips, late(ledger, clips)) for clips in clips_by_site(record)]
    in_time = {i for clips, after in lines for c in clips if c not in after for i in c.parameters}
    for clips, after in lines:
        # where two networks are clipped before the step of either, each is clipped in time as well, from another line
        if after and not set(after[0].parameters) <= in_time:
            step = next((s for s in record.of(Step) if s.at < after[0].at), None)
            by, limit = after[0].by.lstrip("_"), after[0].limit
            repair = "move this line between backward() and step()"
            facts = {"late": len(after), "clips": len(clips), "limit": "unknown" if limit is None else f"{limit:g}"}
            if step is not None:
                repair += f" (step at line {step.place.line})"
                facts["change"] = call_of_helper(after[0].site, step.site)
            yield found("clip_after_step", after[0], (by,), repair=repair, **facts)
    calls, raised = record.scaler_calls(), record.raised.summary if record.raised else ""
    whats = [c.what for c in calls]
    explains = (*LEARNING, "grad_scaler")
    if raised and whats[-1:] == ["update"] and "scale" in whats and "step" not in whats and not record.steps:
        facts = {"scaled": whats.count("scale"), "raised": raised, "explains": explains}
        yield _step_missing(calls[-1], (), "refused", **facts)
    if raised and whats == ["step"] and not ledger.passes:
        culprits = ("scaler.step(optimizer)",)
        yield found("step_before_backward", calls[0], culprits, "scaler", raised=raised, explains=explains)
    yield from early_schedulers(record)


def early_schedulers(record: Record) -> Iterator[Finding]:
    """Schedulers that come before the optimizer in the very first iteration, and go on from the same line.

    One stepped before the loop (to leave a rate of 0, to catch up) goes on from no line; one stepped for each
    micro-batch comes more than once before the first step; where the first batch was skipped openly, a scheduler step
    still follows the last optimizer step. A step that a gradient scaler skipped counts as tried.
    """
    tried = [e.at for e in record.events if isinstance(e, Step) or (isinstance(e, ScalerCall) and e.what == "step")]
    lines: dict[object, list[SchedulerStep]] = defaultdict(list)
    for scheduled in record.of(SchedulerStep):
        if not scheduled.metric:
            lines[scheduled.site].append(scheduled)
    for steps in lines.values() if tried else ():
        if len(steps) == 1 or not steps[0].at < tried[0] < steps[1].at:
            continue
        by_batch = steps[-1].at < tried[-1]
        by_epoch = sum(steps[0].at < at < steps[1].at for at in tried) > 1
        if by_batch or by_epoch:
            lr = next((f"{s.lrs[0]:.3g}" for s in record.of(Step) if s.lrs), "")
            name = f"{steps[0].scheduler}.step()"
            yield found("scheduler_before_optimizer", steps[0], (name,), steps=len(steps), lr=lr)


def cleared_inside(ledger: Ledger, accumulate: int = 0) -> Iterator[Finding]:
    """In every accumulation window equally many micro-batches are cleared: three whole windows and more.

    Passes count as micro-batches where the loop's own knob says how many there are (``accumulate``), or where each has
    a batch of its own: adversarial training and per-sample gradients make several passes over one batch.
    """
    record = ledger.record
    if ledger.assigned or any(w.how == "altered" and "add" in w.by for w in record.of(GradWrite)):
        return
    lines: dict[object, list[Pass]] = defaultdict(list)
    for p in ledger.passes:
        if p.backward.reached:
            lines[p.backward.site].append(p)
    for passes in lines.values():
        lost = [p for p in passes if p.cleared and not p.used and not p.pending]
        groups = [(used, list(g)) for used, g in itertools.groupby(passes, key=lambda p: bool(p.used))]
        if any(_stepped_between(record, a, b) for used, g in groups[:-1] if used for a, b in itertools.pairwise(g)):
            continue  # steps are left out, as at a spike of the loss (repaired: step_left_out_by_the_loss_of_a_rank)
        runs = [(used, len(g)) for used, g in groups]
        cleared = [n for used, n in (runs if runs[-1][0] else runs[:-1]) if not used]
        uses = [n for used, n in runs if used]
        if not lost or len(cleared) < 3 or len(set(cleared)) != 1 or any(_moved_after(ledger, p) for p in lost):
            continue
        size = cleared[0] + max(set(uses), key=uses.count)
        own_batches = all(a.backward.item < b.backward.item for a, b in itertools.pairwise(passes))
        if (own_batches or size == accumulate) and all(p.finite() for p in lost):
            clearing = ledger.after(lost[0].at, lost[0].cleared, "cleared")
            at, by = (clearing.event, clearing.event.by) if clearing else (lost[0].backward, "zero_grad()")
            facts: dict[str, Any] = {"lost": cleared[0], "size": size, "all_lost": len(lost), "passes": len(passes)}
            facts["change"] = call_of_helper(at.site, lost[0].backward.site)
            yield found("zeroed_inside_window", at, (by,), **facts)
            return


def _stepped_between(record: Record, one: Pass, other: Pass) -> bool:
    """Whether a step used the first pass before the second one began. At the end a short window may follow."""
    between = (s for s in record.innermost_steps() if one.at < s.at < other.at)
    return any(one.used & set(record.optimizers[s.optimizer].parameters) for s in between)


def _moved_after(ledger: Ledger, one: Pass) -> bool:
    """Whether the parameters changed between this pass and the next that reaches them, as in SAM's first step."""
    later = ledger.after(one.at, one.cleared, "arrived")
    until = later.at if later else math.inf
    moves = (m for m in ledger.record.moves if m.at > one.at and one.cleared & set(m.parameters))
    return any(m.since < until and m.at <= until + 1 for m in moves)


def another_loss_kept(ledger: Ledger) -> About:
    """Steps that use their own passes, and what a pass left with which another optimizer has stepped already: a
    generator's loss in the step of its discriminator. It may be intended, as a sum of two losses."""
    record = ledger.record
    for optimizer in record.optimizers:
        # of what several optimizers hold it is not known which one used it (odd: codes_to_be_found_again)
        mine = {i for i in optimizer.parameters if len(record.held[i]) == 1}
        seen: list[tuple[Pass, Pass, int]] = []
        windows = [w for w in ledger.windows if w.optimizer == optimizer.index]
        for window in windows:
            used = [p for p in window.passes if mine & p.used]
            own = [p for p in used if p.used <= mine]
            for p in used:
                others = [
                    v.optimizer
                    for v in ledger.windows
                    if own and v.stepped & p.used - mine and p.at < v.until < own[-1].at  # that loss was over then
                ]
                if others and all(p.backward.site != q.backward.site for q in own):
                    seen.append((p, own[-1], others[0]))
                    break
        if len(seen) >= 2 and 2 * len(seen) >= len(windows) and not mine & ledger.assigned:
            left, own_pass, other = seen[0]
            names = record.names(mine & left.used)
            facts = {"kind": optimizer.kind, "other": record.optimizers[other].kind, "kept": len(seen)}
            facts |= {"steps": len(windows), "line": str(left.backward.place).partition("   ")[0], "level": "advice"}
            yield {optimizer.index}, found("another_loss_kept", own_pass.backward, names, **facts)
