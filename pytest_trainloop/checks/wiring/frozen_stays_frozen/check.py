"""What is frozen stays as it is: parameters, and the running statistics of its norms.

What it does
    It watches what changes parameters that do not train (``frozen=`` names them, or they do not require grad), and the
    running statistics of norms among them.

Why is this bad?
    A backbone "frozen" by zeroing its gradients still shrinks by weight decay and drifts by momentum. Batch norms of a
    frozen backbone in training mode follow the new data, and the features change under the head that is trained on
    them.

How it decides
    Only a move inside an optimizer's step, of a parameter that this optimizer holds, is the optimizer's doing: an
    average, a target or a codebook that is written by hand is not. A declared parameter that requires grad, gets
    gradients and moves is still trainable. One that rests and moves all the same: along its own values, or not at all
    in a run without weight decay, it is weight decay; with a gradient that is bit for bit an earlier one it is that
    gradient; else, where an earlier step consumed a gradient of it, momentum. One whose gradient is set to zero before
    every step counts as resting; a group of such with a decay of its own is to shrink. A gradient that was put there
    by hand is meant.
    Running statistics are a fault where all weights of their norm rest, nobody writes these, and the norm belongs to
    what ``frozen=`` names, or was called within a model other parts of which train. Not so where only norms rest, no
    layer beside them, or where something that trains lies before the norm: these statistics must follow. Other buffers
    are looked at only in what ``frozen=`` names.

Faulty
    >>> model.encoder.requires_grad_(False)            # its batch norm still follows the data
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Fixed
    >>> model.encoder.requires_grad_(False).eval()     # and again after every model.train()
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    Statistics of a net that is called by itself (a teacher, a target) and is not declared are advice.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#setting-requires-grad
    https://keras.io/guides/transfer_learning (batch norm and frozen layers)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import be, some, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.frozen_stays_frozen.moved_at_rest import Moved
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("update_ratio",)

CAUSES = {
    "still_trainable": "declared frozen, requires grad, gets gradients and is moved by an optimizer's step",
    "weight_decay": "moves along its own values in a step that finds no new gradient",
    "momentum": "moves in a step that finds no new gradient, and not along its own values",
    "stale_gradient": "moves by a gradient that is bit for bit one that an earlier step consumed",
    "statistics_drift": "the running statistics of a norm whose weights all rest change in the training forward pass",
}

_HOW = {
    "still_trainable": "declared frozen and still trained: {they} {require} grad and the optimizer steps {them}",
    "weight_decay": "frozen, and moved by weight decay",
    "momentum": "frozen, and moved by the momentum that the optimizer kept",
    "stale_gradient": "frozen, and stepped on with an old gradient that was left in .grad",
}

_REPAIRS = {
    "still_trainable": "requires_grad_(False) before the optimizer is built, and hand it only what requires grad",
    "weight_decay": "take frozen parameters out of the optimizer, or leave their .grad at None: zero is not none",
    "momentum": "build the optimizer anew after freezing, or take frozen parameters out of its groups",
    "stale_gradient": "set .grad to None when you freeze: zero_grad(set_to_none=True)",
    "statistics_drift": "call eval() on the frozen part after every train() of the whole model",
}


@check(needs={"fit"}, causes=CAUSES, rank=60)
def frozen_stays_frozen(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.buffers import RestingModules
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.moved_at_rest import drifting, moved_at_rest, told_apart
    from pytest_trainloop.runs.optimizer_options import without_weight_decay

    record = evidence.run()
    moved = moved_at_rest(record)
    if any(m.may_decay for m in moved):
        moved = told_apart(moved, evidence.rerun(contexts=without_weight_decay))
    for cause in _HOW:
        alike = [m for m in moved if m.cause == cause]
        if cause == "weight_decay" and any(m.cause == "momentum" for m in moved):
            continue  # an optimizer that keeps momentum may decay what has none as well
        if cause == "momentum" and alike:
            alike += [m for m in moved if m.cause == "weight_decay"]
        if alike:
            yield _moved(record, cause, alike)
    for level, names, place in drifting(record):
        if names and level == "fault":
            names = _before_all_that_trains(evidence, record, names)
        if names:
            yield _drift(record, level == "fault", names, place)
    if record.frozen:
        for name, place in RestingModules(evidence, record.frozen).written.items():
            yield _written(name, place)


def _before_all_that_trains(evidence: Evidence, record: Record, names: tuple[str, ...]) -> tuple[str, ...]:
    """Without statistics of norms behind something that trains: these must follow what comes in. But for what is
    declared frozen."""
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.buffers import RestingModules

    owners = {name: name.rpartition(".")[0] for name in names}
    fed = RestingModules(evidence, tuple(owners.values())).fed
    return tuple(name for name in names if record.declared_frozen(name) or owners[name] not in fed)


def _written(name: str, place: str) -> Finding:
    return Finding(
        cause="statistics_drift",
        summary=f"{name} is declared frozen, and changes with every training forward pass",
        measured="the buffer differs after a call of its module from what it was before",
        shown_by="seen around the call itself: the module writes it, not a copy or an average",
        culprits=(name,),
        where=place,
        repair=_REPAIRS["statistics_drift"],
        explains=CONSEQUENCES,
    )


def _moved(record: Record, cause: str, moved: Sequence[Moved]) -> Finding:
    names = tuple(m.name for m in moved)
    many = len(names) > 1
    how = _HOW[cause].format(
        they="they" if many else "it", require="require" if many else "requires", them="them" if many else "it"
    )
    most = max(moved, key=lambda m: m.update)
    return Finding(
        cause=cause,
        summary=f"{some(names)} {be(names)} {how}",
        measured=(
            f"{most.steps} of {record.rounds} steps moved {most.name}, "
            + (f"by up to {most.update:.1e} of its largest entry" if most.update < 1e6 else "which began at zero")
        ),
        shown_by=most.shown,
        culprits=names,
        where=most.place,
        repair=_REPAIRS[cause],
        explains=CONSEQUENCES,
    )


def _drift(record: Record, fault: bool, names: Sequence[str], place: str) -> Finding:
    owners = sorted({name.rpartition(".")[0] for name in names})
    return Finding(
        cause="statistics_drift",
        level="fault" if fault else "advice",
        summary=f"{some(names)} {verb(names, 'drift')}: the norm's weights are frozen and it runs in training mode",
        measured=f"{len(names)} running statistics of {len(owners)} norms changed over {record.rounds} steps",
        shown_by="all weights of these norms rest through the run, and their statistics differ from what they were",
        culprits=tuple(names),
        where=place,
        repair=_REPAIRS["statistics_drift"],
        explains=CONSEQUENCES if fault else (),
    )
