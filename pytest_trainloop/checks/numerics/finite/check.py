"""Weights, losses and gradients are finite.

What it does
    It looks at every weight before and after the watched run, at what is backpropagated and at the gradients that steps
    consume. Where something is not finite, or the loop itself looks for such values, the run is made again with every
    operation watched, to find the first one that made it.

Why is this bad?
    One NaN spreads to every weight within a step, and nothing is raised. A NaN loss that is replaced by zero trains on
    without the batch, and nobody knows how many were lost.

How it decides
    A fault is one of five. A weight that trains is not finite before the first step. Weights that were finite are not
    after it; or no loss that was backpropagated was finite, and nothing trained; or every batch is left out since no
    loss is finite, and no step is ever made. A loss, or a gradient, that is not
    finite is made so by an operation (``nan_to_num``, ``where``, an assignment) and a step is made all the same.
    Loops that leave such a batch out openly (no backward pass, or no step) are right, a loss scaler that skips a step
    as well. Infinities that are written out, as masks are, are meant; so is what softmax makes of them.
    The operation named is the first whose result is not finite while all it is given is: in the forward pass, or, where
    that is finite throughout, in the backward pass. Where a step leaves weights not finite before any operation does,
    from finite gradients, that step is named. Where gradients had grown a hundredfold before, that is the cause.

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
    Twelve steps are watched: what overflows later is not seen. Of large tensors up to 128 weights are looked at.

References
    https://docs.pytorch.org/docs/stable/notes/faq.html
    https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import GradWrite
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.records.finiteness import Explosion
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.nonfinite import Birth, Masked, NonFiniteOrigins, Ruin

CONSEQUENCES = ("overfit_one_batch", "loss_at_init", "update_ratio", "every_param_moves")

CAUSES = {
    "nonfinite_parameter": "a weight is not finite before the first step, and nothing sets it before it is used",
    "made_in_forward": "the first result that is not finite while all it is made of is lies in the forward pass",
    "nonfinite_input": "an operation is given what is not finite, and none before it made it: the batch holds it",
    "made_in_backward": "forward pass and loss are finite, and an operation's slope is not",
    "gradients_explode": "gradients grow a hundredfold over the steps before a value is no longer finite",
    "weights_lost": "a step leaves weights not finite that were finite before it, and so were its gradients",
    "nonfinite_masked": (
        "a loss or gradient that is not finite is made so by an operation, and the step is made all the same"
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=10)
def finite(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.records import finiteness
    from pytest_trainloop.tracing.nonfinite import NonFiniteOrigins

    record = evidence.run()
    start = finiteness.bad_from_the_start(record)
    if start:
        yield _from_the_start(start)
        return
    lost, bad = finiteness.ruined(record), finiteness.bad_losses(record)
    wary = record.wary or finiteness.losses_not_finite(record)
    if lost or bad or finiteness.never_stepped(record) or (record.raised is not None and wary):
        yield from _spread(record, evidence.shared(NonFiniteOrigins.of), lost, bad, finiteness.explosion(record))
    elif cleaned := finiteness.cleaned_gradients(record):
        yield _gradient_masked(cleaned, evidence.shared(NonFiniteOrigins.of).gradient)
    elif wary:
        yield from map(_masked, evidence.shared(NonFiniteOrigins.of).masked[:1])


def _spread(
    record: Record, births: NonFiniteOrigins, lost: Sequence[Parameter], bad: int, grown: Explosion | None
) -> Iterator[Finding]:
    """One finding: what came first."""
    birth = births.root or births.gradient or births.loss
    if grown is not None:
        yield _exploding(record, grown, lost, birth)
    elif births.ruin is not None and births.ruin.names:
        yield _stepped(record, births.ruin)
    elif births.root is None and births.masked:
        yield _masked(births.masked[0])
    elif birth is not None:
        yield _born(record, birth, lost, bad)
    elif births.handed is not None:
        yield _handed(births.handed, lost, bad)
    elif lost:
        yield _lost(record, lost)


def _from_the_start(bad: Sequence[Parameter]) -> Finding:
    names = tuple(p.name for p in bad)
    return Finding(
        cause="nonfinite_parameter",
        summary=f"{some(names)} {be(names)} not finite before the first step",
        measured=f"{len(names)} parameters hold NaN or inf when training begins, and still when it ends",
        shown_by="seen before fit was called",
        culprits=names,
        repair="initialise it: torch.empty and nn.Parameter(torch.Tensor(n)) hold what was in memory before",
        explains=CONSEQUENCES,
    )


_REPAIRS = {
    (
        "log",
        "log2",
        "log10",
    ): "log(x.clamp_min(eps)); of probabilities use log_softmax, logsigmoid or a loss with logits",
    ("sqrt", "rsqrt", "norm", "vector_norm", "linalg_vector_norm", "cdist", "std"): (
        "add eps under the root: its slope at 0 is infinite"
    ),
    ("div", "__truediv__", "__rtruediv__", "true_divide", "reciprocal", "div_"): (
        "add eps to the divisor, or clamp_min it; F.normalize does it for directions"
    ),
    ("exp", "exp2", "expm1", "logsumexp", "softmax", "cosh", "sinh"): (
        "take the maximum off first (logsumexp, log_softmax), and cap the scale that multiplies it"
    ),
    ("pow", "__pow__"): "clamp the base away from 0 for exponents below 1, and the size for large ones",
    ("mean", "var"): "leave out empty selections: the mean over no entries is NaN",
}


def _repair(op: str) -> str:
    known = (text for ops, text in _REPAIRS.items() if op in ops)
    return next(known, "keep what goes in within bounds (clamp, normalise, eps), or compute this step in float32")


def _where_from(birth: Birth) -> str:
    inside = f" in {birth.module}" if birth.module else ""
    return f"{birth.op}(){inside}"


def _handed(birth: Birth, lost: Sequence[Parameter], bad: int) -> Finding:
    return Finding(
        cause="nonfinite_input",
        summary=f"{_where_from(birth)} is given values that are not finite, and no operation of torch made them",
        measured=(
            f"{len(lost)} parameters are not finite in the end"
            if lost
            else f"{bad} losses that were backpropagated are not finite"
        ),
        shown_by="the first operation of the run with such a value among what it is given",
        culprits=tuple(name for name in (birth.op, birth.module) if name),
        where=str(birth.place),
        repair="look at the batch (assert x.isfinite().all() where it is loaded), and at what comes from numpy",
        explains=CONSEQUENCES,
    )


def _lost(record: Record, lost: Sequence[Parameter]) -> Finding:
    names = tuple(p.name for p in lost)
    return Finding(
        cause="weights_lost",
        summary=f"{some(names)} {be(names)} not finite after {record.rounds} steps",
        measured=f"{len(names)} of {len(record.parameters)} parameters were finite before training",
        shown_by="every operation of a second run that torch shows gave finite values: a step or a hook made it",
        culprits=names,
        where=record.step_line(),
        repair="look at the optimizer's step (a root of zero, a division by it), and at what is written in place",
        explains=CONSEQUENCES,
    )


def _stepped(record: Record, ruin: Ruin) -> Finding:
    where = record.step_line()
    return Finding(
        cause="weights_lost",
        summary=f"step {ruin.step} of {ruin.kind} leaves {some(ruin.names)} not finite, from finite gradients",
        measured=f"largest gradient before it {ruin.largest:.3g}; {len(ruin.names)} weights are not finite after it"
        + (f"; state of {ruin.names[0]}: {ruin.state}" if ruin.state else ""),
        shown_by="weights and gradients are finite before this step, the first to go wrong in a run that was looked at",
        culprits=ruin.names,
        where=where,
        repair="look at the optimizer's step: a root of zero, a division by it, a product that overflows its dtype",
        explains=CONSEQUENCES,
    )


def _born(record: Record, birth: Birth, lost: Sequence[Parameter], bad: int) -> Finding:
    backward = birth.direction == "backward"
    when = "before any optimizer step" if not birth.step else f"after {birth.step} optimizer steps"
    made = "gradients that are not finite" if backward else birth.value
    given = "infinite" if birth.of_infinite and not backward else "finite"
    trail = f"; before it: {', '.join(birth.trail)}" if birth.trail else ""
    return Finding(
        cause="made_in_backward" if backward else "made_in_forward",
        summary=f"{_where_from(birth)} makes {made} of {given} values, {when}",
        measured=(
            f"it was given values in [{birth.low:.3g}, {birth.high:.3g}]; "
            + (
                f"{len(lost)} of {len(record.parameters)} parameters are not finite in the end"
                if lost
                else f"{bad} of {len(record.backwards())} losses that were backpropagated are not finite"
                if bad
                else "no step was made"
                if not record.steps
                else "fit raised an exception after it"
            )
        ),
        shown_by=(
            "the loss is finite; gradients are where they come in at its result, and are not where they leave it"
            if backward
            else "the first operation of the run that makes NaN, of an infinity that is meant or handed in"
            if birth.of_infinite
            else "the first operation of the run whose result is not finite while all it is given is"
        )
        + trail,
        culprits=tuple(name for name in (birth.op, birth.module) if name),
        where=str(birth.place),
        repair=_repair(birth.op),
        explains=CONSEQUENCES,
    )


def _exploding(record: Record, grown: Explosion, lost: Sequence[Parameter], birth: Birth | None) -> Finding:
    shown = ", ".join(f"{peak:.2g}" for peak in grown.peaks[-6:])
    first = f"; {_where_from(birth)} is the first whose result is not finite" if birth else ""
    return Finding(
        cause="gradients_explode",
        summary=f"the gradients of {grown.name} grow from step {grown.since + 1} on, until nothing is finite",
        measured=f"largest entry by backward pass: {shown}"
        + (f"; {len(lost)} parameters are not finite in the end" if lost else ""),
        shown_by=f"they had grown {grown.peaks[-1] / grown.peaks[0]:.2g} times before{first}",
        culprits=(grown.name,),
        where=record.step_line(),
        repair="lower the rate, warm it up, or clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        explains=CONSEQUENCES,
    )


def _masked(masked: Masked) -> Finding:
    source = f"{_where_from(masked.birth)} at {masked.birth.place}" if masked.birth else "what the batch holds"
    return Finding(
        cause="nonfinite_masked",
        summary=f"a loss that is not finite is replaced by {masked.op}(), and training goes on without the batch",
        measured=f"first in step {masked.step + 1}",
        shown_by=f"what was replaced comes from {source}",
        culprits=(masked.op,),
        where=str(masked.place),
        repair="mend where it comes from; or leave the batch out openly (no backward, no step) and count it",
        explains=CONSEQUENCES,
    )


def _gradient_masked(write: GradWrite, birth: Birth | None) -> Finding:
    source = f"{_where_from(birth)} at {birth.place}" if birth else "not determined"
    return Finding(
        cause="nonfinite_masked",
        summary="gradients that are not finite are replaced, and the step is made with what is left",
        measured=f"{len(set(write.parameters))} parameters' gradients were written by {write.by}",
        shown_by=f"gradients arrive with NaN or inf and are consumed without; they come from {source}",
        culprits=(write.by,),
        where=str(write.place),
        repair="mend where it comes from; or skip the step openly and count it",
        explains=CONSEQUENCES,
    )
