"""Weights, losses and gradients are finite.

What it does
    It looks at every weight before and after the watched run, at the losses that are backpropagated and at the
    gradients that optimizer steps read. Where something is not finite, or where the loop itself tests for such values,
    the run is repeated with every operation watched, to find the first one that produced it.

Why is this bad?
    One NaN spreads to every weight within a step, and nothing is raised. A NaN loss that is replaced by zero trains on
    without the batch, and nobody knows how many batches were lost.

How it decides
    There are five kinds of fault. A trainable weight is not finite before the first step. Weights that were finite
    before training are not after it. No loss that was backpropagated was finite, and nothing trained; or every batch is
    skipped because no loss is finite, and no step is ever made. A loss, or a gradient, that is not finite is made
    finite by an operation (``nan_to_num``, ``where``, an assignment) and a step is made all the same.
    Loops that skip such a batch openly (no backward pass, or no step) are right, and so is a loss scaler that skips a
    step. Infinities written as literals, as in masks, are intended, and so is what softmax makes of them.
    The operation named is the first whose result is not finite while all its inputs are: in the forward pass, or, where
    that is finite throughout, in the backward pass. Where a step leaves weights non-finite from finite gradients before
    any operation does, that step is named. Where gradients had grown a hundredfold before, that is the cause.

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

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.records.nonfinite_repairs import repair_of
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import GradWrite
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.records.finiteness import Explosion
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.nonfinite import BadStep, MaskedLoss, NonFiniteOrigin, NonFiniteOrigins

_EXPLAINS = ("overfit_one_batch", "loss_at_init", "update_ratio", "every_param_moves:not_updated")

CAUSES = {
    "nonfinite_parameter": Cause(
        proof="a weight is not finite before the first step, and nothing sets it before it is used",
        repair="initialise it: torch.empty and nn.Parameter(torch.Tensor(n)) hold what was in memory before",
        explains=_EXPLAINS,
        change=("module",),
    ),
    "made_in_forward": Cause(
        proof="the first operation with finite inputs and a result that is not lies in the forward pass",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "nonfinite_input": Cause(
        proof="an operation has an input that is not finite and that no earlier operation made: the batch holds it",
        repair="look at the batch (assert x.isfinite().all() where it is loaded), and at what comes from numpy",
        explains=_EXPLAINS,
    ),
    "made_in_backward": Cause(
        proof="forward pass and loss are finite, and the slope of an operation is not",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "gradients_explode": Cause(
        proof="gradients grow a hundredfold over the steps before a value is no longer finite",
        repair="lower the learning rate, warm it up, or clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        explains=_EXPLAINS,
        change=("optimizer",),
    ),
    "weights_lost": Cause(
        proof="a step leaves weights non-finite that were finite before it, and so were its gradients",
        repair=(
            "look at the optimizer's step (a root of zero, a division by zero, a product that overflows its dtype), "
            "and at what is written to weights in place"
        ),
        explains=_EXPLAINS,
        change=(
            "step",
            "optimizer",
        ),
    ),
    "nonfinite_masked": Cause(
        proof="an operation makes a non-finite loss or gradient finite, and the step is made all the same",
        repair="fix the operation that it comes from",
        do_not="skip such batches, or replace what is not finite: the operation stays wrong, and these rows "
        "teach nothing",
        explains=_EXPLAINS,
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=10, steps=1)
def finite(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.records import finiteness
    from pytest_trainloop.tracing.nonfinite import NonFiniteOrigins

    record = evidence.run()
    start = tuple(p.name for p in finiteness.nonfinite_from_the_start(record))
    if start:
        yield Finding(
            cause="nonfinite_parameter",
            summary=f"{some(start)} {be(start)} not finite before the first step",
            measured=f"{len(start)} parameters hold NaN or inf when training begins, and still when it ends",
            shown_by="read before fit was called",
            culprits=start,
        )
        return
    lost, bad = finiteness.became_nonfinite(record), finiteness.stepped_nonfinite_losses(record)
    suspicious = record.wary or finiteness.nonfinite_losses(record)
    if not evidence.repeatable:
        yield from _in_single_run(record, lost, bad)
    elif lost or bad or finiteness.never_stepped(record) or (record.raised is not None and suspicious):
        yield from _spread(record, evidence.shared(NonFiniteOrigins.of), lost, bad, finiteness.explosion(record))
    elif cleaned := finiteness.cleaned_gradients(record):
        yield _gradient_masked(cleaned, evidence.shared(NonFiniteOrigins.of).gradient)
    elif suspicious:
        yield from map(_loss_masked, evidence.shared(NonFiniteOrigins.of).masked[:1])


def _in_single_run(record: Record, lost: Sequence[Parameter], bad: int) -> Iterator[Finding]:
    """What the record shows without the operation that made it."""
    from pytest_trainloop.records import finiteness

    grown = finiteness.explosion(record) if lost or bad else None
    if grown is not None:
        yield _exploding(record, grown, lost, None)
    elif lost or bad:
        names = [p.name for p in lost]
        what = f"{some(names)} {be(names)} not finite when the run ends" if lost else "a loss is NaN or inf"
        raise CannotDecide(f"{what}; which operation made it takes further runs: return a TrainLoop from a marked test")
    elif cleaned := finiteness.cleaned_gradients(record):
        yield _gradient_masked(cleaned, None)
    elif finiteness.nonfinite_losses(record):
        raise CannotDecide(
            "a loss is NaN or inf and no weight is; whether it is masked takes further runs: return a TrainLoop from a "
            "marked test"
        )


def _spread(
    record: Record, origins: NonFiniteOrigins, lost: Sequence[Parameter], bad: int, grown: Explosion | None
) -> Iterator[Finding]:
    """One finding: the first thing that went wrong."""
    if grown is not None:
        yield _exploding(record, grown, lost, origins.first)
    elif origins.bad_step is not None and origins.bad_step.names:
        yield _bad_step(record, origins.bad_step)
    elif origins.root is None and origins.masked:
        yield _loss_masked(origins.masked[0])
    elif origins.first is not None:
        yield _operation(record, origins.first, origins.others_like(origins.first), lost, bad)
    elif origins.from_input is not None:
        yield _input(origins.from_input, lost, bad)
    elif lost:
        names = tuple(p.name for p in lost)
        yield Finding(
            cause="weights_lost",
            summary=f"{some(names)} {be(names)} not finite after {record.rounds} steps",
            measured=f"{len(names)} of {len(record.parameters)} parameters were finite before training",
            shown_by="in a second run every operation of torch gave finite values: a step or a hook made it",
            culprits=names,
            where=record.step_line(),
        )


def _input(origin: NonFiniteOrigin, lost: Sequence[Parameter], bad: int) -> Finding:
    return Finding(
        cause="nonfinite_input",
        summary=f"an input of {origin} is not finite, and no operation of torch made it",
        measured=(
            f"{len(lost)} parameters hold NaN or inf when the run ends"
            if lost
            else f"{bad} losses that were backpropagated are not finite"
        ),
        shown_by="it is the first operation of the run with such an input",
        culprits=tuple(name for name in (origin.op, origin.module) if name),
        where=str(origin.place),
    )


def _bad_step(record: Record, step: BadStep) -> Finding:
    return Finding(
        cause="weights_lost",
        summary=f"step {step.step} of {step.kind} leaves {some(step.names)} non-finite, from finite gradients",
        measured=f"largest gradient before it {step.largest:.3g}; {len(step.names)} weights are not finite after it"
        + (f"; state of {step.names[0]}: {step.state}" if step.state else "")
        + (f"; the weights are {step.weights}" if step.narrow else ""),
        shown_by="in a second run weights and gradients are finite before this step, and nothing went wrong earlier",
        culprits=step.names,
        where=record.step_line(),
        repair=f"keep {step.narrow} of the optimizer in {step.weights} (or bfloat16): float16 holds no small squares"
        if step.narrow
        else "",
    )


def _operation(
    record: Record,
    origin: NonFiniteOrigin,
    others: Sequence[NonFiniteOrigin],
    lost: Sequence[Parameter],
    bad: int,
) -> Finding:
    backward = origin.direction == "backward"
    when = "before any optimizer step" if not origin.step else f"after {origin.step} optimizer steps"
    made = "non-finite gradients" if backward else origin.value
    given = "infinite" if origin.nonfinite_input and not backward else "finite"
    if lost:
        outcome = f"{len(lost)} of {len(record.parameters)} parameters hold NaN or inf when the run ends"
    elif bad:
        outcome = f"{bad} of {len(record.backwards())} losses that were backpropagated are not finite"
    else:
        outcome = "fit raised an exception after it" if record.steps else "no step was made"
    if backward:
        shown = "the loss is finite; gradients are finite at its result and not at its inputs"
    elif origin.nonfinite_input:
        shown = "the first operation of the run that makes NaN, from an infinity that is a literal or an input"
    else:
        shown = "the first operation of the run whose result is not finite while all its inputs are"
    repair = repair_of(origin.op, origin.source, origin.low, origin.place.code)
    return Finding(
        cause=f"made_in_{origin.direction}",
        summary=f"{origin} makes {made} of {given} values, {when}",
        measured=f"its inputs lie in [{origin.low:.3g}, {origin.high:.3g}]; {outcome}",
        shown_by=shown + (f"; ranges of values on the way there: {', '.join(origin.trail)}" if origin.trail else ""),
        culprits=tuple(name for name in (origin.op, origin.module) if name),
        where=str(origin.place),
        change="\n".join(dict.fromkeys(str(at.place) for at in (origin, *others))),
        repair=repair.text,
        do_not=repair.do_not,
    )


def _exploding(record: Record, grown: Explosion, lost: Sequence[Parameter], origin: NonFiniteOrigin | None) -> Finding:
    peaks = ", ".join(f"{peak:.2g}" for peak in grown.peaks[-6:])
    return Finding(
        cause="gradients_explode",
        summary=f"the gradients of {grown.name} grow from step {grown.since + 1} on, until nothing is finite",
        measured=f"largest entry by backward pass: {peaks}"
        + (f"; {len(lost)} parameters hold NaN or inf when the run ends" if lost else ""),
        shown_by=f"they had grown {grown.peaks[-1] / grown.peaks[0]:.2g} times before"
        + (f"; {origin} is the first operation whose result is not finite" if origin else ""),
        culprits=(grown.name,),
        where=record.step_line(),
    )


def _loss_masked(masked: MaskedLoss) -> Finding:
    source = f"{masked.origin} at {masked.origin.place}" if masked.origin else "the batch"
    return Finding(
        cause="nonfinite_masked",
        summary=f"a loss that is not finite is replaced by {masked.op}(), and training goes on without the batch",
        measured=f"first in step {masked.step + 1}",
        shown_by=f"the value that was replaced comes from {source}",
        culprits=(masked.op,),
        where=str(masked.place),
        change=str(masked.origin.place) if masked.origin else "",
    )


def _gradient_masked(write: GradWrite, origin: NonFiniteOrigin | None) -> Finding:
    return Finding(
        cause="nonfinite_masked",
        summary="gradients that are not finite are replaced, and the step is made with the rest",
        measured=f"the gradients of {len(set(write.parameters))} parameters were written by {write.by}",
        shown_by="gradients arrive with NaN or inf and the step reads them without; they come from "
        + (f"{origin} at {origin.place}" if origin else "an operation that was not determined"),
        culprits=(write.by,),
        where=str(write.place),
        change=str(origin.place) if origin else "",
    )
