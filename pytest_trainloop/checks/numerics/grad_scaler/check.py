"""Gradients reach the optimizer without the loss scale, and the scale settles.

What it does
    It follows the calls of every gradient scaler (``torch.amp.GradScaler`` and its subclasses) over a watched run:
    which scale each loss got, where it was divided out again, which steps were skipped. A second and a third run, up to
    the first step only, are made with the scale halved.

Why is this bad?
    A gradient that keeps the loss scale is 65536 times too long, and clipping cuts that much too hard. Adam divides the
    factor out again, so that the loss curve shows nothing, while clip, weight decay and eps are off. A scale that falls
    without end skips more and more steps, and then every gradient underflows: the loss stands still and nothing raises.

How it decides
    A scaler that is disabled as the loop is run is judged in a further run: in float16 by the knob ``precision``, and
    on the device that the loop is on (torch disables a scaler for CUDA on a CPU).
    The gradient that a step reads must not depend on the loss scale. Halving a scale is exact in floating point, so the
    gradient is the same bit for bit in both runs. Where it is not, three scales s, s/2 and s/4 separate a part that
    grows with the scale (never unscaled: its differences halve) from one that falls with it (never scaled: they
    double). Nothing else has these proportions, and scales that user code divides out leave no part of either kind.
    A gradient that changes otherwise may have underflowed: it is asked again with every autocast block switched off,
    where halving the scale changes no bit. What is left by then (2^-7 of the gradient or more) is a scaled gradient
    that was used as if it were not: in a penalty on its norm, or in a step along it.
    Of several scalers one alone is halved: a gradient that follows it is scaled by one and unscaled by another.
    An update between a backward pass and its step is tested: with a scale that grows at this update, the gradient that
    the step reads is half of what it is with a constant scale.
    A scale that falls by 2^10 after the first step, or 24 skips in a row with no step at all, are only a suspicion:
    large gradients do that as well. They are a fault where steps are skipped as often with the scale at 2^-24, at which
    no gradient up to 1e12 overflows: what is not finite then does not depend on the scale. Where no loss is finite,
    that is a fault for ``finite``, and where gradients have grown a hundredfold before, one of the learning rate
    (``overfit_one_batch``). The first skips, while the scale is found, are as they should be.
    What torch itself refuses (a second unscale_, a second update) is attributed to the two lines that clash.

Faulty
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     with torch.autocast("cpu", dtype=torch.bfloat16):
    ...         loss = F.cross_entropy(model(x), y)
    ...     scaler.scale(loss).backward()
    ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     # cuts 4096 times too hard
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
    Scalers of other libraries and loss scales of user code are not followed. Of each optimizer the first step is
    compared between scales. Fused optimizers unscale inside their step, where nothing is seen. A scaler whose state is
    loaded before the first step starts where it was saved, so that its scale cannot be halved.

References
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#working-with-multiple-models-losses-and-optimizers
    https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler
    from pytest_trainloop.checks.numerics.grad_scaler.scale_trace import ScaleTrace
    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

_EXPLAINS = (
    "step_order:clip_after_step",
    "step_order:stepped_twice",
    "step_order:zeroed_before_step",
    "finite",
    "parameter_precision",
    "optimizer_numerics",
    "accumulation_equivalence",
    "overfit_one_batch",
    "update_ratio",
    "every_param_moves",
)
_AND_PARITY = (*_EXPLAINS, "precision_parity")

CAUSES = {
    "update_missing": Cause(
        proof="the scaler steps again and again and is never updated",
        repair="call scaler.update() once at the end of each iteration that steps",
        explains=_AND_PARITY,
        change=("seen",),
        settle="a knob precision= that switches the scaler on has it judged there, as a fault",
    ),
    "update_twice": Cause(
        proof="the scaler is updated again with no step since the last update, and torch refuses",
        repair="call scaler.update() once, right after the steps of an iteration that makes them",
        explains=_AND_PARITY,
        change=("seen",),
    ),
    "update_between": Cause(
        proof="a scale that grows in the update between backward and step changes the gradient that the step reads",
        repair="call scaler.update() once, after the steps of all optimizers whose gradients were made at this scale",
        explains=_AND_PARITY,
        change=("seen",),
    ),
    "unscaled_twice": Cause(
        proof="unscale_ is called on gradients that are unscaled already, and torch refuses",
        repair="unscale once, before scaler.step(optimizer)",
        explains=_AND_PARITY,
        change=("seen",),
    ),
    "unscaled_inside_window": Cause(
        proof="the gradient that the step reads depends on the scale, and a backward pass came after unscale_",
        repair="unscale once, after the last backward pass and before clipping",
        explains=_AND_PARITY,
        change=("seen",),
    ),
    "clip_before_unscale": Cause(
        proof="gradients are clipped while they still carry the loss scale",
        repair="call scaler.unscale_(optimizer) before clipping",
        explains=_AND_PARITY,
        change=("seen",),
        settle="a knob precision= that switches the scaler on has it judged there, as a fault",
    ),
    "not_unscaled": Cause(
        proof="the gradient that a direct optimizer.step() reads grows with the loss scale",
        repair="scaler.step(optimizer) in place of optimizer.step(), or scaler.unscale_(optimizer) before it",
        explains=_AND_PARITY,
        change=("seen",),
    ),
    "not_scaled": Cause(
        proof="the gradient that the step reads has a part that falls as the loss scale grows: it was never scaled",
        repair="scaler.scale(loss).backward() for every loss whose gradients scaler.step(optimizer) unscales",
        explains=_AND_PARITY,
        change=("seen",),
    ),
    "scale_in_loss": Cause(
        proof="the gradient that the step reads changes when only the scale is halved, in float32 without autocast",
        repair="divide a gradient by scaler.get_scale() before it is used; where it is read from .grad, call "
        "scaler.unscale_(optimizer) before",
        explains=(*_AND_PARITY, "loss_at_init"),
        change=("seen",),
    ),
    "another_scaler": Cause(
        proof="with the scale of one scaler alone halved, the gradient that the step reads is half, or twice, as large",
        repair="scale the loss and step its optimizer with the same scaler; one scaler for all optimizers will do",
        explains=_AND_PARITY,
        change=("seen",),
    ),
    "scaler_recreated": Cause(
        proof="every step has its own scaler, so no scale ever adapts",
        repair="build one GradScaler before the loop, and keep it (its state too) for the whole training",
        explains=_AND_PARITY,
        change=(
            "scaler",
            "seen",
        ),
    ),
    "scale_collapsed": Cause(
        proof="the scale falls without end, and steps are skipped as often at the lowest scale of all",
        repair="fix the operation that is not finite",
        do_not="skip such batches: the operation stays wrong, and these rows teach nothing",
        explains=("overfit_one_batch", "update_ratio", "every_param_moves:not_updated"),
        change=("seen",),
    ),
}

SKIPS = 24
"""Skips in a row with no step made: from 2^16 down to 2^-8, where a gradient of 65504 * 2^8 would have fit."""

FEW = 4
"""Scalers, of which each is tried by a run of its own."""

FALL = 10
"""Powers of two that a scale must fall by, once a step was made, to be suspicious."""


def _no_scaler(evidence: Evidence) -> str:
    from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler

    if evidence.run().scaler_calls():
        return ""
    if "precision" not in evidence.knobs or not evidence.repeatable:
        return "no GradScaler is called"
    called = EnabledScaler.enabled_in(evidence.shared(EnabledScaler).run())
    return "" if called else "no GradScaler is called, with the knob precision= in float16 neither"


@check(needs={"fit"}, causes=CAUSES, rank=25, steps=1, absent=_no_scaler)
def grad_scaler(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler

    record = evidence.run()
    if not EnabledScaler.enabled_in(record) and evidence.repeatable:
        if "precision" not in evidence.knobs and not record.scaler_calls():
            return
        other = evidence.shared(EnabledScaler)
        if EnabledScaler.enabled_in(other.run()):
            # whether its values are finite in that precision is asked by precision_parity
            for finding in (*_wrong_calls(other, other.run()), *_recreated(other.run())):
                yield replace(finding, shown_by=f"{finding.shown_by}; {other.how}")
            return
    wrong = list(_wrong_calls(evidence, record))
    yield from wrong
    if not wrong and record.raised is None:
        yield from _recreated(record) or _scale_traces(evidence, record)


def _wrong_calls(evidence: Evidence | EnabledScaler, record: Record) -> Iterator[Finding]:
    """What the order of the calls shows, and otherwise what gradients show that depend on the scale."""
    from pytest_trainloop.checks.numerics.grad_scaler.findings import call_order_findings

    found = list(call_order_findings(record))
    yield from found
    if not found and any(call.enabled for call in record.scaler_calls()):
        yield from _scale_dependences(evidence, record)


def _scale_dependences(evidence: Evidence | EnabledScaler, record: Record) -> Iterator[Finding]:
    """Gradients that depend on the scale when a step reads them."""
    from pytest_trainloop.checks.numerics.grad_scaler import findings
    from pytest_trainloop.checks.numerics.grad_scaler.call_windows import (
        through_scaler,
        unscaled_early,
        updates_between,
    )
    from pytest_trainloop.checks.numerics.grad_scaler.rescaled_runs import ROUNDING, RescaledRuns

    if not record.steps:
        return
    between = next(updates_between(record), None)
    if between is not None:
        factor = evidence.shared(RescaledRuns).grows_between(between.optimizer, between.nth)
        if factor is not None and round(factor, 2) == 0.5:
            yield findings.update_between(record, between, factor)
            return
    dependences = list(evidence.shared(RescaledRuns).dependences())
    for found in dependences:
        if early := unscaled_early(record, found.optimizer):
            yield findings.unscaled_inside_window(found, *early)
        elif found.kind == "falls":
            yield findings.not_scaled(record, found)
        elif found.kind == "grows" and through_scaler(record, found.optimizer) is None:
            yield findings.not_unscaled(record, found)  # through a scaler, a fused optimizer unscales inside its step
        else:
            change = evidence.shared(RescaledRuns).in_float32(found.optimizer) if not found.whole else None
            if change is not None and change > ROUNDING:
                yield findings.scale_in_loss(record, found, change)
    if not dependences and 1 < len({call.scaler for call in record.scaler_calls() if call.enabled}) <= FEW:
        crossed = evidence.shared(RescaledRuns).crossed()
        if crossed is not None:
            yield findings.another_scaler(record, *crossed)


def _recreated(record: Record) -> list[Finding]:
    """Scalers that never adapt, since each makes one step."""
    from pytest_trainloop.checks.numerics.grad_scaler import findings, scale_trace

    traces = scale_trace.traces(record)
    if not scale_trace.of_one_step_each(traces):
        return []
    return [findings.scaler_recreated(scale_trace.joined(traces), len(traces))]


def _scale_traces(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Scales that fall without end."""
    from pytest_trainloop.checks.numerics.grad_scaler import scale_trace
    from pytest_trainloop.records.finiteness import explosion
    from pytest_trainloop.runs.further_runs import longer_run

    traces = scale_trace.traces(record)
    suspicious = any(t.skipped_since >= 2 or t.first_made == len(t.made) > 2 for t in traces)
    some_loss_finite = any(math.isfinite(root.value) for b in record.backwards() for root in b.roots)
    if not suspicious or not some_loss_finite or explosion(record) is not None:
        return  # no finite loss is a fault for finite, and an explosion one of the learning rate
    stuck_already = any(t.first_made == len(t.made) >= SKIPS for t in traces)
    for trace in traces if stuck_already else scale_trace.traces(evidence.shared(longer_run)):
        stuck = trace.first_made == len(trace.made) >= SKIPS
        if stuck or (trace.skipped_since >= FALL and trace.fall >= FALL):
            yield from _collapsed(evidence, trace)
            return


def _collapsed(evidence: Evidence, trace: ScaleTrace) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.grad_scaler.findings import scale_collapsed
    from pytest_trainloop.checks.numerics.grad_scaler.rescaled_runs import RescaledRuns

    tried = SKIPS if trace.skipped == len(trace.made) else len(trace.made)
    lowest = evidence.shared(RescaledRuns).at_lowest(tried)
    if lowest.skipped and 2 * lowest.skipped * len(trace.made) >= trace.skipped * lowest.tried:
        yield scale_collapsed(trace, lowest)  # else the scale is what overflows, and a lower one will fit
