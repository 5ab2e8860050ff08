"""Calls of a gradient scaler in an order in which they cannot do what they are for. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import Backward, GradWrite, ScalerCall, Step
from pytest_trainloop.records.clips import clips_by_site, comes_after_step
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record

CONSEQUENCES = (
    "step_order",
    "finite",
    "parameter_precision",
    "precision_parity",
    "optimizer_numerics",
    "accumulation_equivalence",
    "overfit_one_batch",
    "update_ratio",
    "every_param_moves",
)


def order_findings(record: Record) -> Iterator[Finding]:
    """Faults that the order of the calls, or torch's own refusal, shows."""
    yield from _clips(record)
    for scaler in sorted({c.scaler for c in record.scaler_calls()}):
        calls = [c for c in record.scaler_calls() if c.scaler == scaler]
        yield from _never_updated(record, calls)
    yield from _unscaled_twice(record)
    yield from _updated_twice(record)
    yield from _never_scaled(record)


def _clips(record: Record) -> Iterator[Finding]:
    """Clips while gradients still carry the loss scale."""
    for clips in clips_by_site(record):
        late = [c for c in clips if comes_after_step(record, c)]
        scaled = [_Scaled(c, *s) for c in clips if (s := _scaled(record, c)) is not None and not _scaled_limit(c, s[0])]
        if len(scaled) >= 2 and not (len(late) >= 2 and 2 * len(late) > len(clips)):
            yield _clip_before_unscale(record, scaled)


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A clip of gradients of which some still carry the factor of this call."""

    clip: GradWrite
    scale: ScalerCall
    carrying: frozenset[int]


def _scaled(record: Record, clip: GradWrite) -> tuple[ScalerCall, frozenset[int]] | None:
    """The call that scaled the loss, and the parameters of optimizers whose gradients still carry its factor when they
    are clipped: each optimizer is unscaled by itself."""
    scale: ScalerCall | None = None
    carrying: set[int] = set()
    for event in record.events:
        if event.at >= clip.at:
            break
        if isinstance(event, ScalerCall) and event.what == "scale":
            scale = event
        elif isinstance(event, ScalerCall) and event.what in ("unscale", "step"):
            carrying -= set(record.optimizers[event.optimizer].parameters) if event.optimizer is not None else carrying
        elif isinstance(event, Backward) and scale is not None:
            carrying |= set(event.arrivals)
        elif isinstance(event, GradWrite) and event.how in ("assigned", "altered"):
            carrying -= set(event.parameters)  # divided by hand, as far as call order can tell
    left = frozenset(carrying & set(clip.parameters) & set(record.held))
    return (scale, left) if scale is not None and left else None


def _scaled_limit(clip: GradWrite, scale: ScalerCall) -> bool:
    """Whether the limit was multiplied by the loss scale too: limits from 0.01 up are in use, scales begin at 2**10."""
    return clip.limit is not None and math.isfinite(scale.factor) and clip.limit >= 0.01 * scale.factor > 1


def _clip_before_unscale(record: Record, scaled: list[_Scaled]) -> Finding:
    clip, scale, left = scaled[0].clip, scaled[0].scale, scaled[0].carrying
    factor = f"{scale.factor:g}" if math.isfinite(scale.factor) else "the loss scale"
    limit = "unknown" if clip.limit is None else f"{clip.limit:g}"
    in_part = set(clip.parameters) & set(record.held) > left
    kinds = sorted({record.optimizers[o].kind for i in left for o in record.held[i]})
    names = record.names(left) if in_part else ()
    return Finding(
        cause="clip_before_unscale",
        level="fault" if scale.enabled else "advice",
        summary=(
            f"gradients {f'of {some(names)} ' if in_part else ''}are clipped while they still carry the loss scale of "
            f"{factor}: "
            + ("the others beside them hardly count" if in_part else f"the limit bites {factor} times too hard")
        ),
        measured=f"limit {limit} on gradients times {factor}, in {len(scaled)} steps"
        + ("" if scale.enabled else " (this scaler is switched off here)"),
        shown_by="order seen: scale, backward, clip, with no unscale_ between backward and clip"
        + (f" for {' and '.join(kinds)}, which holds them" if in_part else ""),
        culprits=(clip.by.lstrip("_"), *names),
        where=str(clip.place),
        repair="call scaler.unscale_(optimizer) before clipping" + (", for every optimizer" if in_part else ""),
        explains=CONSEQUENCES,
    )


def _never_updated(record: Record, calls: list[ScalerCall]) -> Iterator[Finding]:
    """A scaler that steps (or unscales for a step that is made by hand) and is never updated."""
    if any(c.what == "update" for c in calls):
        return
    steps = [c for c in calls if c.what == "step"]
    refused = _refused(record, "since the last update()", "called after step()") and record.scaler_calls()[-1] in calls
    if refused:
        last = record.scaler_calls()[-1]
        earlier = [
            c for c in calls if c.what in ("step", "unscale") and c.optimizer == last.optimizer and c is not last
        ]
        again = [c for c in earlier if _lies_between(record, c, last)]
    else:
        again = [c for c in steps if sum(d.optimizer == c.optimizer for d in steps) > 1]
    if not again:
        return
    yield Finding(
        cause="update_missing",
        level="fault" if again[0].enabled else "advice",
        summary="scaler.step() is called again and again without scaler.update(): "
        + ("torch refuses to go on" if refused else "the scale is never adjusted")
        if steps
        else "scaler.unscale_() is called again and again without scaler.update(): torch refuses to go on",
        measured=f"{len(steps)} scaler steps, 0 updates",
        shown_by=f"torch raised: {record.raised.summary}"
        if refused and record.raised
        else "no update was seen in the run",
        culprits=("scaler.update()",),
        where=str((steps or again)[-1].place),
        repair="call scaler.update() once at the end of each iteration that steps"
        + ("" if steps else ", and scaler.step(optimizer) in place of optimizer.step()"),
        explains=CONSEQUENCES,
    )


def _lies_between(record: Record, first: ScalerCall, last: ScalerCall) -> bool:
    """Whether the two belong to two iterations: a step was made, and another backward pass came."""
    stepped = first.what == "step" or any(first.at < s.at < last.at for s in record.of(Step))
    passes = any(first.at < b.at < last.at for b in record.of(Backward))
    return stepped and (passes or last.what == "step")


def _refused(record: Record, *words: str) -> bool:
    return record.raised is not None and any(w in record.raised.message for w in words)


def _unscaled_twice(record: Record) -> Iterator[Finding]:
    """Gradients that are unscaled by unscale_ a second time, or after step() has unscaled them: torch refuses."""
    calls = record.scaler_calls()
    if not calls or not _refused(record, "unscale_() has already been called", "unscale_() is being called after"):
        return
    last = calls[-1]
    mine = [c for c in calls[:-1] if (c.scaler, c.optimizer) == (last.scaler, last.optimizer)]
    first = next((c for c in reversed(mine) if c.what in ("step", "unscale")), None)
    updated = any(c.what == "update" and c.scaler == last.scaler for c in calls)
    if first is None or (_lies_between(record, first, last) and not updated):
        return
    inside = next((c for c in mine if c.what == "step" and c.at < first.at < c.until), first)
    between = [b for b in record.of(Backward) if first.at < b.at < last.at]
    name = "scaler.unscale_(optimizer)"
    yield Finding(
        cause="unscaled_twice",
        summary=f"{name} is called after scaler.step(optimizer), which has unscaled these gradients already"
        if inside.what == "step"
        else f"{name} is called twice before scaler.update()"
        + (", with another backward pass in between" if between else ""),
        measured=f"first at {inside.place.file}:{inside.place.line}, then at {last.place.file}:{last.place.line}",
        shown_by=f"torch raised: {record.raised.summary if record.raised else ''}",
        culprits=(name,),
        where=str(last.place),
        repair="unscale once, before scaler.step(optimizer)"
        if not between
        else "unscale once, after the last backward pass of the window; call scaler.update() in every iteration that "
        "unscales, one that makes no step included",
        explains=CONSEQUENCES,
    )


def _updated_twice(record: Record) -> Iterator[Finding]:
    """An update with no step or unscale_ since the last one: torch refuses."""
    calls = record.scaler_calls()
    if not calls or calls[-1].what != "update" or not _refused(record, "No inf checks were recorded prior to update"):
        return
    last = calls[-1]
    mine = [c for c in calls[:-1] if c.scaler == last.scaler and not _inner(c, calls)]
    before = next((c for c in reversed(mine) if c.what == "update"), None)
    if before is None:
        return  # never a step at all: step_order
    scaled = any(c.what == "scale" and c.at > before.at for c in mine)
    yield Finding(
        cause="update_twice",
        summary="scaler.update() is called in an iteration in which scaler.step() is not"
        if scaled
        else "scaler.update() is called twice after one step",
        measured=f"at {before.place.file}:{before.place.line}, then at {last.place.file}:{last.place.line}, "
        "no scaler.step() between",
        shown_by=f"torch raised: {record.raised.summary if record.raised else ''}",
        culprits=("scaler.update()",),
        where=str(last.place),
        repair="call scaler.update() once, right after the steps of an iteration that makes them",
        explains=CONSEQUENCES,
    )


def _never_scaled(record: Record) -> Iterator[Finding]:
    """A scaler that is to step or to unscale and never scaled a loss: torch refuses."""
    calls = record.scaler_calls()
    if not calls or any(c.what == "scale" for c in calls) or not _refused(record, "_scale is None"):
        return
    passes = record.backwards()
    yield Finding(
        cause="not_scaled",
        summary=f"scaler.{'unscale_' if calls[-1].what == 'unscale' else calls[-1].what}() has nothing to unscale: "
        "no loss was ever scaled, and torch refuses",
        measured=f"0 losses scaled, {len(passes)} backward passes",
        shown_by=f"torch raised: {record.raised.summary if record.raised else ''}",
        culprits=("scaler.scale(loss)",),
        where=str((passes or calls)[-1].place),
        repair="scaler.scale(loss).backward() in place of loss.backward()",
        explains=CONSEQUENCES,
    )


def _inner(call: ScalerCall, calls: list[ScalerCall]) -> bool:
    """Whether the call was made by another (step() unscales by itself)."""
    return any(c.what == "step" and c.at < call.at < c.until for c in calls)
