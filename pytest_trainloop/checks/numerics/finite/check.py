"""Weights, losses and gradients are finite.

What it does
    It looks at every weight before and after the watched run, at the losses that are backpropagated and at the
    gradients that optimizer steps read. Where something is not finite, or where the loop itself tests for such values,
    the run is repeated with every operation watched, to find the first one that produced it.

Why is this bad?
    One NaN spreads to every weight within a step, and nothing is raised. A NaN loss that is replaced by zero trains on
    without the batch, and nobody knows how many batches were lost.

How it decides
    1. It looks at weights before and after the watched run, at backpropagated losses, and at gradients that steps read.
    2. If something is not finite, or the loop tests for that, the run is repeated with every operation watched. The
       first operation is named whose result is not finite while all its inputs are.
    3. Loops that skip such a batch openly (no backward pass, or no step) pass. So do loss scalers that skip a step,
       infinities written as literals (masks), and what softmax makes of them.
    4. A loop that skips every batch, because no loss is finite, is a fault.

    | first that holds                                                      | cause                   |
    |-----------------------------------------------------------------------|-------------------------|
    | a trainable weight is not finite before the first step                | ``nonfinite_parameter`` |
    | gradients had grown a hundredfold before                              | ``gradients_explode``   |
    | a step leaves weights non-finite from finite gradients                | ``weights_lost``        |
    | an operation makes such a loss or gradient finite, and a step is made | ``nonfinite_masked``    |
    | an operation makes it in the forward pass                             | ``made_in_forward``     |
    | forward is finite throughout, and an operation makes it in backward   | ``made_in_backward``    |
    | the batch holds it                                                    | ``nonfinite_input``     |

When it is skipped
    It skips what it cannot explain in a run that is only watched, since such a run cannot be repeated.

Faulty
    >>> start = [p.detach().clone() for p in model.parameters()]
    >>> for x, y in batches:
    ...     away = sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start))
    ...     optimizer.zero_grad()
    ...     (F.cross_entropy(model(x), y) + 0.1 * away.sqrt()).backward()       # the slope of a root at 0
    ...     optimizer.step()

Fixed
    >>> start = [p.detach().clone() for p in model.parameters()]
    >>> for x, y in batches:
    ...     away = sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start))
    ...     optimizer.zero_grad()
    ...     (F.cross_entropy(model(x), y) + 0.1 * (away + 1e-12).sqrt()).backward()
    ...     optimizer.step()

Known limits
    Twelve steps are watched: what overflows later is not seen. Of large tensors up to 128 weights are read.

References
    https://docs.pytorch.org/docs/stable/notes/faq.html
    https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.numerics.finite.causes import CAUSES, found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check
from pytest_trainloop.core.wording import be, some
from pytest_trainloop.instruments.records.nonfinite_repairs import repair_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.records.finiteness import Explosion
    from pytest_trainloop.instruments.tracing.nonfinite import MaskedLoss, NonFiniteOrigin, NonFiniteOrigins
    from pytest_trainloop.recording.events import GradWrite
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=10, steps=1)
def finite(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.instruments.records import finiteness
    from pytest_trainloop.instruments.tracing.nonfinite import NonFiniteOrigins

    record = evidence.run()
    if start := [p.name for p in finiteness.nonfinite_from_the_start(record)]:
        yield found("nonfinite_parameter", "", start, count=len(start))
        return
    lost = [p.name for p in finiteness.became_nonfinite(record)]
    bad, suspicious = finiteness.stepped_nonfinite_losses(record), finiteness.nonfinite_losses(record)
    wrong = lost or bad
    if not evidence.repeatable:
        if wrong and (grown := finiteness.explosion(record)):
            yield exploding(record, grown, lost, None)
        elif wrong:
            what = f"{some(lost)} {be(lost)} not finite when the run ends" if lost else "a loss is NaN or inf"
            raise CannotDecide(
                f"{what}; which operation made it takes further runs: return a TrainLoop from a marked test"
            )
        elif cleaned := finiteness.cleaned_gradients(record):
            yield gradient_masked(cleaned, None)
        elif suspicious:
            raise CannotDecide(
                "a loss is NaN or inf and no weight is; whether it is masked takes further runs: return a TrainLoop "
                "from a marked test"
            )
    elif wrong or finiteness.never_stepped(record) or (record.raised is not None and (record.wary or suspicious)):
        yield from first_of_all(record, evidence.shared(NonFiniteOrigins.of), lost, bad)
    elif cleaned := finiteness.cleaned_gradients(record):
        yield gradient_masked(cleaned, evidence.shared(NonFiniteOrigins.of).gradient)
    elif record.wary or suspicious:
        yield from map(loss_masked, evidence.shared(NonFiniteOrigins.of).masked[:1])


def first_of_all(record: Record, origins: NonFiniteOrigins, lost: Sequence[str], bad: int) -> Iterator[Finding]:
    """The first thing that went wrong."""
    from pytest_trainloop.instruments.records.finiteness import explosion

    parameters, step = len(record.parameters), origins.bad_step
    if grown := explosion(record):
        yield exploding(record, grown, lost, origins.first)
    elif step is not None and step.names:
        facts: dict[str, Any] = {"steps": step.step, "kind": step.kind, "largest": step.largest, "state": step.state}
        facts |= {"lost": len(step.names), "first": step.names[0], "narrow": step.narrow, "weights": step.weights}
        variant = "narrow state" if step.narrow else "step"
        yield found("weights_lost", record.step_line(), step.names, variant, **facts)
    elif origins.root is None and origins.masked:
        yield loss_masked(origins.masked[0])
    elif (first := origins.first) is not None:
        backward = first.direction == "backward"
        facts = {"origin": first, "value": first.value, "given": first.nonfinite_input and not backward}
        facts |= {"low": first.low, "high": first.high, "trail": ", ".join(first.trail), "steps": record.steps}
        facts |= {"lost": len(lost), "bad": 0 if lost else bad, "unseen": not lost and not bad}
        facts |= {"parameters": parameters, "passes": len(record.backwards())}
        facts["when"] = f"after {first.step} optimizer steps" if first.step else "before any optimizer step"
        places = (str(at.place) for at in (first, *origins.others_like(first)))
        facts["change"] = "\n".join(dict.fromkeys(places))
        facts["repair"], do_not = repair_of(first.op, first.source, first.low, first.place.code)
        cause = "made_in_backward" if backward else "made_in_forward"
        yield replace(found(cause, first, filter(None, (first.op, first.module)), **facts), do_not=do_not)
    elif (given := origins.from_input) is not None:
        culprits = filter(None, (given.op, given.module))
        yield found("nonfinite_input", given, culprits, origin=given, lost=len(lost), bad=bad)
    elif lost:
        facts = {"steps": record.rounds, "lost": len(lost), "parameters": parameters}
        yield found("weights_lost", record.step_line(), lost, **facts)


def exploding(record: Record, grown: Explosion, lost: Sequence[str], origin: NonFiniteOrigin | None) -> Finding:
    facts: dict[str, Any] = {"since": grown.since + 1, "lost": len(lost), "origin": origin or ""}
    facts["peaks"] = ", ".join(f"{peak:.2g}" for peak in grown.peaks[-6:])
    facts["growth"] = grown.peaks[-1] / grown.peaks[0]
    return found("gradients_explode", record.step_line(), (grown.name,), **facts)


def loss_masked(masked: MaskedLoss) -> Finding:
    facts = {"step": masked.step + 1, "origin": "the batch"}
    if masked.origin:
        facts |= {"origin": f"{masked.origin} at {masked.origin.place}", "change": str(masked.origin.place)}
    return found("nonfinite_masked", masked, (masked.op,), **facts)


def gradient_masked(write: GradWrite, origin: NonFiniteOrigin | None) -> Finding:
    facts = {"written": len(set(write.parameters)), "origin": "an operation that was not determined"}
    if origin:
        facts |= {"origin": f"{origin} at {origin.place}", "change": str(origin.place)}
    return found("nonfinite_masked", write, (write.by,), "gradient", **facts)
