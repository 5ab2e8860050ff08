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
    average, a target or a codebook that user code writes is not. A declared parameter that requires grad, gets
    gradients and moves is still trainable. One that does not train and moves all the same was moved by weight decay if
    the update runs along its own values, or if it stays in a run without weight decay; by an old gradient if what the
    step reads is bit for bit an earlier one; else by momentum, where an earlier step used a gradient of it. One whose
    gradient is set to zero before every step counts as frozen; a group of such with a larger decay of its own is to
    shrink. A gradient that user code assigns is meant.
    Running statistics are a fault where all weights of their norm are frozen and nobody writes these, and where the
    norm belongs to what ``frozen=`` names, or was called within a model other parts of which train. Not so where only
    norms are frozen, with no layer next to them, or where something that trains lies before the norm: these statistics
    must follow. Other buffers are looked at only in what ``frozen=`` names.
    A filter that is to freeze by names and matches none is advice. The names that ``named_parameters()`` hands out note
    what they are asked (``in``, ``startswith``, ``endswith``, ``==``). A pattern that is true of none gets the answer
    "yes" in a further build and step: for the names that it all but has (``embeddings.`` for ``bert.embeddings.``), or
    for one, where nothing matches in that function. It is a filter of what is frozen where their parameters are frozen
    then.

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
    Statistics of a net that is called on its own (a teacher, a target) and is not declared are advice. Filters by
    ``re`` and by sets of names are not seen.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#setting-requires-grad
    https://keras.io/guides/transfer_learning (batch norm and frozen layers)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, some, them, they, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.frozen_stays_frozen.drift import Drift
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.moved_at_rest import Moved
    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "still_trainable": Cause(
        proof="named in frozen=, requires grad, gets gradients and is moved by an optimizer's step",
        repair="requires_grad_(False) on them before this line, and give the optimizer only what requires grad",
        explains=("update_ratio",),
        change=("group",),
    ),
    "weight_decay": Cause(
        proof="moves along its own values in a step that finds no new gradient",
        repair=(
            "give the optimizer only (p for p in parameters if p.requires_grad), or leave their .grad at None: zero is "
            "not none"
        ),
        explains=("update_ratio",),
        change=("group",),
    ),
    "momentum": Cause(
        proof="moves in a step that finds no new gradient, and not along its own values",
        repair="build the optimizer anew after this line, or take what is frozen out of its groups",
        explains=("update_ratio",),
        change=(
            "freeze",
            "group",
        ),
    ),
    "stale_gradient": Cause(
        proof="moves by a gradient that is bit for bit one that an earlier step used",
        repair="zero_grad(set_to_none=True) on what is frozen, after this line",
        explains=("update_ratio",),
        change=(
            "freeze",
            "seen",
        ),
    ),
    "statistics_drift": Cause(
        proof="the running statistics of a norm whose weights are all frozen change in the training forward pass",
        change=("freeze",),
        repair="eval() on the frozen part (model.backbone.eval()), after every train() of the whole model",
        explains=("update_ratio",),
    ),
    "freeze_matches_nothing": Cause(
        proof="a pattern is true of no name, and freezes parameters that train where it is answered yes for them",
        summary="the freeze by {patterns} matches no parameter: {names} {names:are} trained",
        measured="asked of {asked:name}, true of none",
        shown_by="with the answer yes, the same code freezes {names}",
        variants={
            "alone": {
                "summary": "the freeze by {patterns} matches no parameter and freezes nothing",
                "measured": "asked of {asked:name}, true of none; the names begin with {names}",
                "shown_by": "with the answer yes for one name, the same code freezes its parameter",
            }
        },
        repair="the names that named_parameters() gives in this model; raise where a pattern matches none of them",
        change=("seen",),
        source="https://github.com/huggingface/lerobot/issues/4018",
    ),
}

_SHOWN = {
    "still_trainable": "it requires grad, a gradient arrives, and the step that reads it moves it",
    "weight_decay": "without weight decay the same run leaves it where it is",
    "momentum": "the step finds a gradient of zero or none, and the update is no decay",
    "stale_gradient": "the gradient that the step reads is bit for bit one read before",
}


def _nothing_frozen(evidence: Evidence) -> str:
    from pytest_trainloop.recording.events import Step

    record = evidence.run()
    if record.frozen or any(not p.trainable for p in record.parameters) or any(s.frozen for s in record.of(Step)):
        return ""
    return "no parameter is frozen: all require gradients, and frozen= names none"


@check(needs={"fit"}, causes=CAUSES, rank=60, steps=1, absent=_nothing_frozen)
def frozen_stays_frozen(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.buffers import FrozenModules
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.drift import drifting
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.moved_at_rest import moved_at_rest, without_decay
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.unmatched_filters import unmatched_filters
    from pytest_trainloop.runs.optimizer_options import without_weight_decay

    record = evidence.run()
    moved = moved_at_rest(record)
    if any(m.may_decay for m in moved):
        moved = without_decay(moved, evidence.rerun(contexts=without_weight_decay))
    by_cause = {cause: [m for m in moved if m.cause == cause] for cause in _SHOWN}
    if by_cause["momentum"]:  # an optimizer that keeps momentum may decay what has none as well
        by_cause["momentum"] += by_cause.pop("weight_decay")
    for cause, found in by_cause.items():
        if found:
            yield _moved(record, cause, found)
    fault, advice = drifting(record)
    names = _fed_by_frozen_parts(evidence, record, fault.names)
    if names:
        yield _drift(record, "fault", names, fault)
    if advice.names:
        yield _drift(record, "advice", advice.names, advice)
    written = FrozenModules(evidence, record.frozen).written if record.frozen else {}
    for name, place in written.items():
        yield Finding(
            cause="statistics_drift",
            summary=f"{name} is named in frozen=, and changes with every training forward pass",
            measured="the buffer differs after a call of its module from what it was before",
            shown_by="seen around the call itself: the module writes it, not a copy or an average",
            culprits=(name,),
            where=place,
        )
    yield from unmatched_filters(evidence)


def _fed_by_frozen_parts(evidence: Evidence, record: Record, names: Sequence[str]) -> tuple[str, ...]:
    """Statistics of norms before which nothing trains, and those that are declared frozen: behind something that trains
    they must follow what arrives."""
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.buffers import FrozenModules

    owners = {name: name.rpartition(".")[0] for name in names}
    fed = FrozenModules(evidence, tuple(owners.values())).fed if names else set()
    return tuple(name for name in names if record.declared_frozen(name) or owners[name] not in fed)


def _moved(record: Record, cause: str, moved: Sequence[Moved]) -> Finding:
    names = tuple(m.name for m in moved)
    how = {
        "still_trainable": (
            f"named in frozen= and still trained: {they(names)} {verb(names, 'require')} grad and the optimizer steps "
            f"{them(names)}"
        ),
        "weight_decay": "frozen, and moved by weight decay",
        "momentum": "frozen, and moved by the momentum that the optimizer kept",
        "stale_gradient": "frozen, and stepped with an old gradient that was left in .grad",
    }[cause]
    most = max(moved, key=lambda m: m.update)
    shown = _SHOWN[most.cause]
    if most.cosine is not None:
        shown = f"the step shrinks the weights: its direction agreement with them is {most.cosine:.4f} (-1 = opposite)"
    return Finding(
        cause=cause,
        summary=f"{some(names)} {be(names)} {how}",
        measured=(
            f"{most.steps} of {record.rounds} steps moved {most.name}, "
            + (f"by up to {most.update:.1e} of its largest entry" if most.update < 1e6 else "which began at zero")
        ),
        shown_by=shown,
        culprits=names,
        where=most.place,
    )


def _drift(record: Record, level: Level, names: Sequence[str], drift: Drift) -> Finding:
    owners = {name.rpartition(".")[0] for name in names}
    return Finding(
        cause="statistics_drift",
        level=level,
        summary=f"{some(names)} {verb(names, 'drift')}: the norm's weights are frozen and it runs in training mode",
        measured=f"{len(names)} running statistics of {len(owners)} norms changed over {record.rounds} steps",
        shown_by="all weights of these norms are frozen through the run, and their statistics differ from the start",
        culprits=tuple(names),
        where=drift.place,
        change=drift.switched,
    )
