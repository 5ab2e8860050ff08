"""What grad_scaler says of each cause."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.numerics.grad_scaler import call_order
from pytest_trainloop.checks.numerics.grad_scaler.call_windows import (
    altered_before,
    backwards_for,
    first_step,
    unscaled_at,
)
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.wording import share, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.grad_scaler.call_order import MissingUpdate, RefusedCall, ScaledClip
    from pytest_trainloop.checks.numerics.grad_scaler.call_windows import UpdateBetween
    from pytest_trainloop.checks.numerics.grad_scaler.rescaled_runs import AtLowest, ScaleDependence
    from pytest_trainloop.checks.numerics.grad_scaler.scale_trace import ScaleTrace
    from pytest_trainloop.recording.events import Place, ScalerCall
    from pytest_trainloop.recording.record import Record

_THREE_RUNS = "three runs at three scales, all else equal: the gradient that the step reads"


def call_order_findings(record: Record) -> Iterator[Finding]:
    """Faults that the order of the calls, or torch's own refusal, shows."""
    raised = f"torch raised: {record.raised.summary}" if record.raised else ""
    yield from (_clip_before_unscale(record, found) for found in call_order.scaled_clips(record))
    yield from (_update_missing(found, raised) for found in call_order.missing_updates(record))
    if twice := call_order.unscaled_twice(record):
        yield _unscaled_twice(twice, raised)
    if twice := call_order.updated_twice(record):
        yield _update_twice(twice, raised)
    if call := call_order.never_scaled(record):
        passes = record.backwards()
        yield Finding(
            cause="not_scaled",
            summary=f"scaler.{'unscale_' if call.what == 'unscale' else call.what}() has nothing to unscale: no loss "
            "was ever scaled, and torch refuses",
            measured=f"0 losses scaled, {len(passes)} backward passes",
            shown_by=raised,
            culprits=("scaler.scale(loss)",),
            where=str(passes[-1].place if passes else call.place),
            repair="scaler.scale(loss).backward() in place of loss.backward()",
        )


def _clip_before_unscale(record: Record, found: ScaledClip) -> Finding:
    clip, scale = found.clip, found.scale
    known = scale.enabled and math.isfinite(scale.factor)
    factor = f" of {scale.factor:g}" if known else ""
    consequence = f"the limit is {scale.factor:g} times too low" if known else "the limit is too low by this scale"
    names = record.names(found.carrying) if found.partial else ()
    kinds = sorted({record.optimizers[o].kind for i in found.carrying for o in record.held[i]})
    return Finding(
        cause="clip_before_unscale",
        level="fault" if scale.enabled else "advice",
        summary=(
            f"gradients {f'of {some(names)} ' if found.partial else ''}are clipped while they still carry the loss "
            f"scale{factor}{'' if scale.enabled else ', wherever the scaler is enabled'}: "
            + ("the others hardly count in the norm" if found.partial else consequence)
        ),
        measured=f"limit {'unknown' if clip.limit is None else f'{clip.limit:g}'} on gradients"
        + (f" times {scale.factor:g}" if known else "")
        + f", in {found.steps} steps"
        + ("" if scale.enabled else " (this scaler is disabled here)"),
        shown_by="order seen: scale, backward, clip, with no unscale_ between backward and clip"
        + (f" for {' and '.join(kinds)}, which holds them" if found.partial else ""),
        culprits=(clip.by.lstrip("_"), *names),
        where=str(clip.place),
        repair="call scaler.unscale_(optimizer) before clipping, for every optimizer" if found.partial else "",
    )


def _update_missing(found: MissingUpdate, raised: str) -> Finding:
    call = "step" if found.steps else "unscale_"
    outcome = "torch refuses to go on" if found.refused else "the scale is never adjusted"
    return Finding(
        cause="update_missing",
        level="fault" if found.enabled else "advice",
        summary=f"scaler.{call}() is called again and again without scaler.update(): {outcome}",
        measured=f"{found.steps} scaler steps, 0 updates",
        shown_by=raised if found.refused else "no update was seen in the run",
        culprits=("scaler.update()",),
        where=str(found.place),
        repair=""
        if found.steps
        else "call scaler.update() once at the end of each iteration that steps, and scaler.step(optimizer) in place "
        "of optimizer.step()",
    )


def _unscaled_twice(found: RefusedCall, raised: str) -> Finding:
    name = "scaler.unscale_(optimizer)"
    return Finding(
        cause="unscaled_twice",
        summary=f"{name} is called after scaler.step(optimizer), which has unscaled these gradients already"
        if found.earlier.what == "step"
        else f"{name} is called twice before scaler.update()"
        + (", with another backward pass in between" if found.between else ""),
        measured=f"first at {_line(found.earlier.place)}, then at {_line(found.refused.place)}",
        shown_by=raised,
        culprits=(name,),
        where=str(found.refused.place),
        repair="unscale once, after the last backward pass of the window; call scaler.update() in every iteration that "
        "unscales, also in one that makes no step"
        if found.between
        else "",
    )


def _update_twice(found: RefusedCall, raised: str) -> Finding:
    return Finding(
        cause="update_twice",
        summary="scaler.update() is called in an iteration in which scaler.step() is not"
        if found.between
        else "scaler.update() is called twice after one step",
        measured=f"at {_line(found.earlier.place)}, then at {_line(found.refused.place)}, no scaler.step() between",
        shown_by=raised,
        culprits=("scaler.update()",),
        where=str(found.refused.place),
    )


def update_between(record: Record, found: UpdateBetween, factor: float) -> Finding:
    kind = record.optimizers[found.optimizer].kind
    return Finding(
        cause="update_between",
        summary=f"scaler.update() runs between the backward pass and the step of {kind}: "
        + ("its gradients are unscaled twice" if found.unscaled else "its gradients are unscaled by another scale"),
        measured=f"where the scale doubles in this update, the step reads {factor:.3g} times the gradient",
        shown_by="two runs, with a scale that grows at every update and with a constant one; update at "
        f"{_line(found.update.place)}, step at {_line(found.step.place)}",
        culprits=("scaler.update()", f"scaler.step({kind})"),
        where=str(found.update.place),
    )


def unscaled_inside_window(found: ScaleDependence, unscale: ScalerCall, backward: Backward) -> Finding:
    return Finding(
        cause="unscaled_inside_window",
        summary="scaler.unscale_() runs before the last backward pass of a step: later gradients are added with their "
        "scale",
        measured=_measured(found),
        shown_by=f"unscale_ at {_line(unscale.place)}, then backward at {_line(backward.place)}; the gradient that the "
        "step reads depends on the scale",
        culprits=("scaler.unscale_(optimizer)", *found.names),
        where=str(unscale.place),
    )


def not_unscaled(record: Record, found: ScaleDependence) -> Finding:
    kind, step = record.optimizers[found.optimizer].kind, first_step(record, found.optimizer)
    return Finding(
        cause="not_unscaled",
        summary=f"{kind}.step() is called directly on gradients that carry the loss scale: {_extent(found)}",
        measured=_measured(found),
        shown_by=f"{_THREE_RUNS} grows with the scale",
        culprits=("optimizer.step()", *found.names),
        where=record.step_line() if step is None else str(step.place),
    )


def not_scaled(record: Record, found: ScaleDependence) -> Finding:
    """A gradient that falls as the scale grows: it is divided by a scale that it never had, or that a clip removed."""
    write = altered_before(record, found.optimizer, unscaled_at(record, found.optimizer))
    if write is not None and found.whole:
        return Finding(
            cause="clip_before_unscale",
            summary="gradients are brought to a fixed size while they still carry the loss scale: unscaling then makes "
            "them too small by this factor",
            measured=_measured(found),
            shown_by=f"{_THREE_RUNS} falls as the scale grows",
            culprits=(write.by, *found.names),
            where=str(write.place),
        )
    scales = sum(c.what == "scale" for c in record.scaler_calls())
    passes = backwards_for(record, found.optimizer)
    at = write or (passes[-1] if passes else first_step(record, found.optimizer))
    return Finding(
        cause="not_scaled",
        summary=f"gradients of {some(found.names)} that were never scaled are unscaled all the same: {_extent(found)}",
        measured=f"{_measured(found)}; {scales} losses scaled, {len(record.backwards())} backward passes in the run",
        shown_by=f"{_THREE_RUNS} falls as the scale grows",
        culprits=("scaler.scale(loss)", *found.names),
        where=str(at.place) if at is not None else record.step_line(),
    )


def scale_in_loss(record: Record, found: ScaleDependence, change: float) -> Finding:
    """A gradient that depends on the scale in no way that a missing scale or unscale explains."""
    step = first_step(record, found.optimizer)
    before = [b for b in record.of(Backward) if step is None or b.at < step.at]
    used = next((b for b in before if b.kind == "grad"), None)
    moved = [m.at for m in record.moves if m.by is None and set(m.parameters) & set(record.held)]
    use = (
        "a scaled gradient enters the loss" if used is not None else "it, or the weights, were changed by a scaled one"
    )
    place = used.place if used is not None else before[-1].place if before else None
    return Finding(
        cause="scale_in_loss",
        summary=f"the gradient that {record.optimizers[found.optimizer].kind} reads depends on the loss scale: {use}",
        measured=f"with the scale halved from 1024 it changes by {share(change)} of its length, in float32"
        + (", and weights are moved by hand before the step" if moved and used is None else ""),
        shown_by="two runs without autocast at two scales, all else equal: halving the scale is exact there",
        culprits=("scaler.scale(loss)",),
        where=record.step_line() if place is None else str(place),
        repair="divide it by the scale before it is used: slope / scaler.get_scale()" if used is not None else "",
    )


def another_scaler(record: Record, optimizer: int, nth: int, factor: float) -> Finding:
    kind, step = record.optimizers[optimizer].kind, first_step(record, optimizer)
    scaled = [c for c in record.scaler_calls() if c.what == "scale" and c.enabled and step and c.at < step.at]
    return Finding(
        cause="another_scaler",
        summary=f"the gradients that this step of {kind} reads are scaled by one GradScaler and unscaled by another: "
        "they are right only while both have the same scale",
        measured=f"with the scale of one scaler alone halved (number {nth + 1} of those built), the step reads "
        f"{factor:.3g} times the gradient" + (f"\nscaled at {scaled[-1].place}" if scaled else ""),
        shown_by="two runs that differ in the scale of one scaler",
        culprits=(f"scaler.step({kind})",),
        where=record.step_line() if step is None else str(step.place),
    )


def scaler_recreated(found: ScaleTrace, count: int) -> Finding:
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
    )


def scale_collapsed(found: ScaleTrace, lowest: AtLowest) -> Finding:
    origin = lowest.origin
    return Finding(
        cause="scale_collapsed",
        summary=(
            f"the loss scale falls without end, and {found.skipped} of {len(found.made)} steps are skipped: "
            "gradients are not finite at any scale"
        ),
        measured=f"{found}; {lowest.skipped} of {lowest.tried} skipped in a run from scale 2^-24",
        shown_by="at the lowest scale as many steps are skipped, so it is not the scale that overflows"
        + (f"; {origin} makes the first {origin.value} ({origin.direction} pass)" if origin else ""),
        culprits=(origin.op if origin else "scaler.step(optimizer)",),
        where=str(origin.place if origin else found.place),
    )


def _line(place: Place) -> str:
    return f"{place.file}:{place.line}"


def _extent(found: ScaleDependence) -> str:
    what = "the whole gradient" if found.whole else "a part of the gradient"
    return f"{what} is {'multiplied' if found.kind == 'grows' else 'divided'} by the scale"


def _measured(found: ScaleDependence) -> str:
    halved = f"with the scale halved from {found.scale:g}, the first step reads"
    if found.whole:
        return f"{halved} {found.factor:.4g} times the gradient"
    if found.kind == "otherwise":
        return f"{halved} another gradient"
    double = "half" if found.kind == "grows" else "twice"
    return f"{halved} another gradient, and from {found.scale / 2:g} to {found.scale / 4:g} it changes {double} as much"
