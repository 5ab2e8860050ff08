"""Gradients reach the optimizer unscaled by the number that the loss was scaled with, and the scale settles.

What it does
    It follows the calls of every gradient scaler (``torch.amp.GradScaler`` and what derives from it) over a watched
    run: which scale each loss got, where it was taken off again, which steps were skipped. A second and a third run,
    up to the first step only, are made with the scale halved.

Why is this bad?
    A gradient that keeps the loss scale is 65536 times too long, and clipping bites that much too hard. Adam divides
    the factor out again, so the loss curve shows nothing, while clip, weight decay and eps are off. A scale that falls
    without end skips more and more steps, and then every gradient underflows: the loss stands still and nothing raises.

How it decides
    What a step consumes must not depend on the loss scale. Halving a scale is exact in floating point, so the gradient
    is the same bit for bit in both runs. Where it is not, three scales s, s/2 and s/4 separate a part that grows with
    the scale (never unscaled: its differences halve) from one that falls with it (never scaled: they double). Nothing
    else has these proportions, and scales that are managed by hand leave no part of either kind.
    An update between a backward pass and its step is tried: with a scale that grows at this update, the gradient
    consumed is half of what it is with a scale that stays.
    A scale that falls by 2^10 after the first step, or 24 skips in a row with no step at all, are only a suspicion:
    large gradients do that as well. They are a fault where steps are skipped as often with the scale at 2^-24, at which
    no gradient up to 1e12 overflows: what is not finite then is not so for the scale's sake. Where no loss is finite,
    that is ``finite``'s to tell, and where gradients have grown a hundredfold before, it is the rate's doing
    (``overfit_one_batch``). The first skips, while the scale is found, are as it should be.
    What torch itself refuses (a second unscale_, a second update) is put down to the two lines that clash.

Faulty
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     with torch.autocast("cpu", dtype=torch.bfloat16):
    ...         loss = F.cross_entropy(model(x), y)
    ...     scaler.scale(loss).backward()
    ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     # bites 4096 times too hard
    ...     scaler.step(optimizer)
    ...     scaler.update()

Fixed
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     with torch.autocast("cpu", dtype=torch.bfloat16):
    ...         loss = F.cross_entropy(model(x), y)
    ...     scaler.scale(loss).backward()
    ...     scaler.unscale_(optimizer)
    ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ...     scaler.step(optimizer)
    ...     scaler.update()

Known limits
    Scalers of other libraries and loss scales by hand are not followed. Of each optimizer the first step is compared
    between scales. Fused optimizers unscale inside their step, where nothing is seen. A scaler whose state is loaded
    before the first step starts where it was saved, so that its scale cannot be halved.

References
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#working-with-multiple-models-losses-and-optimizers
    https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.grad_scaler.call_windows import Between
    from pytest_trainloop.checks.numerics.grad_scaler.rescaled_runs import AtLowest, Dependence
    from pytest_trainloop.checks.numerics.grad_scaler.scale_trace import Trace
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "update_missing": "the scaler steps again and again and is never updated",
    "update_twice": "the scaler is updated again with no step since the last update, and torch refuses",
    "update_between": "a scale that grows in the update between backward and step changes the gradient consumed",
    "unscaled_twice": "unscale_ is called on gradients that are unscaled already, and torch refuses",
    "unscaled_inside_window": "the gradient consumed depends on the scale, and a backward pass came after unscale_",
    "clip_before_unscale": "gradients are clipped while they still carry the loss scale",
    "not_unscaled": "the gradient that a direct optimizer.step() consumes grows with the loss scale",
    "not_scaled": "the gradient consumed has a part that falls as the loss scale grows: it was never scaled",
    "scaler_recreated": "every step has a scaler of its own, so no scale ever adapts",
    "scale_collapsed": "the scale falls without end, and steps are skipped as often at the lowest scale of all",
}

SKIPS = 24
"""Skips in a row with no step made: from 2^16 down to 2^-8, where a gradient of 65504 * 2^8 would have fit."""

FALL = 10
"""Powers of two by which a scale that had been found falls again before it is looked at."""


@check(needs={"fit"}, causes=CAUSES, rank=25)
def grad_scaler(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.grad_scaler.call_order import order_findings

    record = evidence.run()
    if not record.scaler_calls():
        return
    found = list(order_findings(record))
    yield from found
    if found or not any(call.enabled for call in record.scaler_calls()):
        return
    wrong = list(_dependences(evidence, record))
    yield from wrong
    if not wrong and record.raised is None:
        yield from _traces(evidence, record)


def _dependences(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Gradients that depend on the scale when they are consumed."""
    from pytest_trainloop.checks.numerics.grad_scaler.call_windows import updated_between
    from pytest_trainloop.checks.numerics.grad_scaler.rescaled_runs import Rescaled

    if not record.steps:
        return
    between = next(updated_between(record), None)
    if between is not None:
        factor = evidence.shared(Rescaled).grows_between(between.optimizer, between.nth)
        if factor is not None and round(factor, 2) == 0.5:
            yield _update_between(record, between, factor)
            return
    for dependence in evidence.shared(Rescaled).dependences():
        finding = _unscaled_inside(record, dependence) or _by_kind(record, dependence)
        if finding is not None:
            yield finding


def _by_kind(record: Record, found: Dependence) -> Finding | None:
    if found.kind == "falls":
        return _not_scaled(record, found)
    return _not_unscaled(record, found) if found.kind == "grows" else None


def _unscaled_inside(record: Record, found: Dependence) -> Finding | None:
    """A gradient that depends on the scale, and was added to after it had been unscaled: whatever became of the part
    that came first."""
    from pytest_trainloop.checks.numerics.grad_scaler.call_order import CONSEQUENCES
    from pytest_trainloop.checks.numerics.grad_scaler.call_windows import unscaled_early

    early = unscaled_early(record, found.optimizer)
    if early is None:
        return None
    unscale, backward = early
    return Finding(
        cause="unscaled_inside_window",
        summary="scaler.unscale_() runs before the last backward pass of a step: what comes later is added with its "
        "scale on",
        measured=_measured(found),
        shown_by=f"unscale_ at {unscale.place.file}:{unscale.place.line}, then backward at "
        f"{backward.place.file}:{backward.place.line}; the gradient consumed depends on the scale",
        culprits=("scaler.unscale_(optimizer)", *found.names[:8]),
        where=str(unscale.place),
        repair="unscale once, after the last backward pass and before clipping",
        explains=CONSEQUENCES,
    )


def _update_between(record: Record, between: Between, factor: float) -> Finding:
    from pytest_trainloop.checks.numerics.grad_scaler.call_order import CONSEQUENCES

    kind = record.optimizers[between.optimizer].kind
    again = between.unscaled is not None
    return Finding(
        cause="update_between",
        summary=f"scaler.update() runs between the backward pass and the step of {kind}: "
        + ("its gradients are unscaled twice" if again else "its gradients are unscaled by another scale than theirs"),
        measured=f"where the scale doubles in this update, the step consumes {factor:.3g} times the gradient",
        shown_by=f"two runs, with a scale that grows at every update and with one that stays; update at "
        f"{between.update.place.file}:{between.update.place.line}, step at "
        f"{between.step.place.file}:{between.step.place.line}",
        culprits=("scaler.update()", f"scaler.step({kind})"),
        where=str(between.update.place),
        repair="call scaler.update() once, after the steps of all optimizers whose gradients were made at this scale",
        explains=CONSEQUENCES,
    )


def _not_unscaled(record: Record, found: Dependence) -> Finding | None:
    """A gradient that grows with the scale: stepped on directly."""
    from pytest_trainloop.checks.numerics.grad_scaler.call_order import CONSEQUENCES
    from pytest_trainloop.checks.numerics.grad_scaler.call_windows import first_step, through_scaler

    kind = record.optimizers[found.optimizer].kind
    if through_scaler(record, found.optimizer) is not None:
        return None  # a fused optimizer unscales by itself
    return Finding(
        cause="not_unscaled",
        summary=f"{kind}.step() is called directly on gradients that carry the loss scale: {_extent(found)}",
        measured=_measured(found),
        shown_by="three runs at three scales, all else alike: the gradient consumed grows with the scale",
        culprits=("optimizer.step()", *found.names[:8]),
        where=str(first_step(record, found.optimizer)),
        repair="scaler.step(optimizer) in place of optimizer.step(), or scaler.unscale_(optimizer) before it",
        explains=CONSEQUENCES,
    )


def _not_scaled(record: Record, found: Dependence) -> Finding:
    """A gradient that falls as the scale grows: divided by a scale that it never had."""
    from pytest_trainloop.checks.numerics.grad_scaler.call_order import CONSEQUENCES
    from pytest_trainloop.checks.numerics.grad_scaler.call_windows import (
        altered_before,
        backwards_for,
        first_step,
        unscaled_at,
    )

    write = altered_before(record, found.optimizer, unscaled_at(record, found.optimizer))
    if write is not None and found.whole:
        return Finding(
            cause="clip_before_unscale",
            summary="gradients are brought to a given size while they still carry the loss scale: after unscaling they "
            "are as many times too small",
            measured=_measured(found),
            shown_by="three runs at three scales, all else alike: the gradient consumed falls as the scale grows",
            culprits=(write.by, *found.names[:8]),
            where=str(write.place),
            repair="call scaler.unscale_(optimizer) before clipping",
            explains=CONSEQUENCES,
        )
    scales = sum(c.what == "scale" for c in record.scaler_calls())
    passes = backwards_for(record, found.optimizer)
    place = write.place if write is not None else passes[-1].place if passes else first_step(record, found.optimizer)
    return Finding(
        cause="not_scaled",
        summary=f"gradients of {some(found.names)} that were never scaled are unscaled all the same: {_extent(found)}",
        measured=f"{_measured(found)}; {scales} losses scaled, {len(record.backwards())} backward passes in the run",
        shown_by="three runs at three scales, all else alike: the gradient consumed falls as the scale grows",
        culprits=("scaler.scale(loss)", *found.names[:8]),
        where=str(place),
        repair="scaler.scale(loss).backward() for every loss whose gradients scaler.step(optimizer) is to unscale",
        explains=CONSEQUENCES,
    )


def _extent(found: Dependence) -> str:
    what = "the whole gradient" if found.whole else "a part of the gradient"
    return f"{what} is {'multiplied' if found.kind == 'grows' else 'divided'} by the scale"


def _measured(found: Dependence) -> str:
    halved = f"with the scale halved from {found.scale:g}, the first step consumes"
    if found.whole:
        return f"{halved} {found.factor:.4g} times the gradient"
    if found.kind == "otherwise":
        return f"{halved} another gradient"
    double = "half" if found.kind == "grows" else "twice"
    return f"{halved} another gradient, and from {found.scale / 2:g} to {found.scale / 4:g} it changes {double} as much"


def _traces(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Scales that never adapt, or fall without end."""
    from pytest_trainloop.checks.numerics.grad_scaler import scale_trace
    from pytest_trainloop.records.finiteness import explosion
    from pytest_trainloop.runs.further_runs import longer_run

    found = scale_trace.traces(record)
    if scale_trace.of_one_step_each(found):
        yield _made_anew(scale_trace.joined(found), len(found))
        return
    if not any(t.skipped_since >= 2 or t.first_made == len(t.made) > 2 for t in found) or _lost_anyway(record):
        return
    if explosion(record) is not None:
        return  # the scale falls since the gradients grow: a matter of the rate
    stuck_already = any(t.first_made == len(t.made) >= SKIPS for t in found)
    for fallen in found if stuck_already else scale_trace.traces(evidence.shared(longer_run)):
        stuck = fallen.first_made == len(fallen.made) >= SKIPS
        if stuck or (fallen.skipped_since >= FALL and fallen.fall >= FALL):
            yield from _collapsed(evidence, fallen)
            return


def _lost_anyway(record: Record) -> bool:
    """Whether no loss was finite: there is nothing to scale (finite)."""
    return not any(math.isfinite(root.value) for b in record.backwards() for root in b.roots)


def _made_anew(found: Trace, count: int) -> Finding:
    from pytest_trainloop.checks.numerics.grad_scaler.call_order import CONSEQUENCES

    lost = found.skipped >= 3 and 2 * found.skipped >= count
    return Finding(
        cause="scaler_recreated",
        level="fault" if lost else "advice",
        summary=f"every step has a new GradScaler: {found.skipped} of {count} steps are skipped, and the scale never "
        "adapts"
        if lost
        else "every step has a new GradScaler, whose scale can never adapt to the gradients",
        measured=f"{count} scalers for {count} steps; {found}",
        shown_by="each scaler stepped once and another took its place",
        culprits=("GradScaler()",),
        where=str(found.place),
        repair="build one GradScaler before the loop, and keep it (its state too) for the whole training",
        explains=CONSEQUENCES if lost else (),
    )


def _collapsed(evidence: Evidence, found: Trace) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.grad_scaler.call_order import CONSEQUENCES
    from pytest_trainloop.checks.numerics.grad_scaler.rescaled_runs import Rescaled

    tried = SKIPS if found.skipped == len(found.made) else len(found.made)
    lowest = evidence.shared(Rescaled).at_lowest(tried)
    if not lowest.skipped or 2 * lowest.skipped * len(found.made) < found.skipped * lowest.tried:
        return  # they do overflow for the scale's sake, and will fit
    place, source = _source(lowest, found.place)
    yield Finding(
        cause="scale_collapsed",
        summary=(
            f"the loss scale falls without end, and {found.skipped} of {len(found.made)} steps are skipped: "
            "gradients are not finite at any scale"
        ),
        measured=f"{found}; {lowest.skipped} of {lowest.tried} skipped in a run from scale 2^-24",
        shown_by=f"at the lowest scale as many steps are skipped, so it is not the scale that overflows{source}",
        culprits=(lowest.origin.op if lowest.origin else "scaler.step(optimizer)",),
        where=place,
        repair="mend the operation that makes what is not finite; leave a bad batch out before scaler.scale(loss)",
        explains=tuple(c for c in CONSEQUENCES if c != "precision_parity"),  # which knows the operation
    )


def _source(lowest: AtLowest, fallback: Place) -> tuple[str, str]:
    origin = lowest.origin
    if origin is None:
        return str(fallback), ""
    return str(origin.place), f"; {origin} makes the first {origin.value} ({origin.direction} pass)"
