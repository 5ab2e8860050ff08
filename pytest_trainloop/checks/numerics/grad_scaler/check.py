"""Gradients reach the optimizer without the loss scale, and the scale settles.

What it does
    It follows the calls of every gradient scaler (``torch.amp.GradScaler`` and its subclasses) over a watched run. It
    notes which scale each loss got, where it was divided out again, and which steps were skipped. A second and a third
    run, up to the first step only, are made with the scale halved.

Why is this bad?
    A gradient that keeps the loss scale is 65536 times too long, and clipping cuts that much too hard. Adam divides the
    factor out again, so that the loss curve shows nothing, while clip, weight decay and eps are off. A scale that falls
    without end skips more and more steps, and then every gradient underflows: the loss stops changing and nothing
    raises.

How it decides
    1. A scaler that is disabled in the watched run is judged in a further run, in float16 by the knob ``precision``.
    2. What the order of calls shows comes first. What torch refuses is attributed to the two lines that clash.
    3. Halving a scale is exact, so gradients must be equal, bit for bit. Otherwise three scales s, s/2 and s/4 separate
       a part that grows with the scale from one that falls with it (docs/how-it-decides.md#the-loss-scale).
    4. A gradient that changes otherwise may have underflowed. It is asked again with every autocast block switched off.
       What is left then, 2^-7 of the gradient or more, is a scaled gradient used as if it were not.
    5. A scale that falls by 2^10, or 24 skips in a row, are only a suspicion. It is a fault if steps are skipped as
       often at 2^-24, at which no gradient up to 1e12 overflows.
    6. Losses that are never finite belong to ``finite``, and exploding gradients to the learning rate.

    | seen | cause | advice if |
    |---|---|---|
    | steps and no update | ``update_missing`` | scaler disabled |
    | a second update, or a second ``unscale_`` | ``update_twice``, ``unscaled_twice`` |  |
    | a backward pass after ``unscale_`` | ``unscaled_inside_window`` |  |
    | a clip of scaled gradients | ``clip_before_unscale`` | scaler disabled |
    | differences halve with the scale; they double | ``not_unscaled``, ``not_scaled`` |  |
    | a scale that grows at an update halves the gradient read | ``update_between`` |  |
    | of several scalers, one alone halved changes it | ``another_scaler`` |  |
    | item 4 | ``scale_in_loss`` |  |
    | each scaler makes one step only | ``scaler_recreated`` | fewer than half skipped |
    | item 5 | ``scale_collapsed`` |  |

When it is skipped
    It skips a loop without a scaler.

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

from pytest_trainloop.checks.numerics.grad_scaler.causes import CAUSES, found
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

SKIPS = 24
"""Skips in a row with no step made: from 2^16 down to 2^-8, where a gradient of 65504 * 2^8 would have fit."""

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


@check(needs={"fit"}, causes=CAUSES, rank=25, steps=10, absent=_no_scaler)
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
        yield from list(_recreated(record)) or _collapsed(evidence, record)


def _wrong_calls(evidence: Evidence | EnabledScaler, record: Record) -> Iterator[Finding]:
    """What the order of the calls shows, and otherwise what gradients show that depend on the scale."""
    from pytest_trainloop.checks.numerics.grad_scaler import calls, rescaled
    from pytest_trainloop.instruments.records.gradient_ledger import Ledger

    if not record.scaler_calls():
        return
    ledger = Ledger(record)
    order = list(calls.call_order(ledger))
    yield from order
    if not order and any(call.enabled for call in record.scaler_calls()):
        yield from rescaled.scale_findings(evidence, ledger)


def _recreated(record: Record) -> Iterator[Finding]:
    """Scalers that never adapt, since each makes one step."""
    from pytest_trainloop.checks.numerics.grad_scaler.calls import joined

    if (trace := joined(record)) is not None:
        lost = trace.skipped >= 3 and 2 * trace.skipped >= len(trace.made)
        facts = {"steps": len(trace.made), "skipped": trace.skipped, "trace": trace}
        facts["level"] = "fault" if lost else "advice"
        yield found("scaler_recreated", trace, ("GradScaler()",), "lost" if lost else "", **facts)


def _collapsed(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Scales that fall without end."""
    from pytest_trainloop.checks.numerics.grad_scaler import calls, rescaled
    from pytest_trainloop.instruments.records.finiteness import explosion
    from pytest_trainloop.runs.further_runs import longer_run

    traces = calls.traces(record)
    suspicious = any(t.skipped_since >= 2 or t.first_made == len(t.made) > 2 for t in traces)
    some_loss_finite = any(math.isfinite(root.value) for b in record.backwards() for root in b.roots)
    if not suspicious or not some_loss_finite or explosion(record) is not None:
        return  # no finite loss is a fault for finite, and an explosion one of the learning rate
    stuck_already = any(t.first_made == len(t.made) >= SKIPS for t in traces)
    for trace in traces if stuck_already else calls.traces(evidence.shared(longer_run)):
        stuck = trace.first_made == len(trace.made) >= SKIPS
        if stuck or (trace.skipped_since >= FALL and trace.fall >= FALL):
            tries = SKIPS if trace.skipped == len(trace.made) else len(trace.made)
            yield from rescaled.scale_collapsed(evidence, trace, tries)
            return
