"""Every parameter that gets a gradient is held by an optimizer.

What it does
    After a watched run it compares the tensors in the optimizers' groups with the parameters that gradients arrived at.

Why is this bad?
    A head that was never passed to the optimizer, or a model that was copied after the optimizer was built, trains on
    as if nothing were wrong:
    the loss falls a little, through the rest or not at all, and nothing is raised.

How it decides
    A parameter is missing iff it requires grad, a gradient that is not zero arrived at it, no optimizer holds it and
    nothing else moved it. Not missing:
    what ``frozen=`` names; what is kept in eval mode beside a training rest (a fixed perceptual net); targets that
    follow by an average; parameters stepped
    by hand. Tensors that an optimizer holds beyond the model (a learned temperature, an image that is optimised) are
    fine as long as gradients reach them. Where only such train (an image, a latent code) the model is advice, unless
    their gradients were put there by hand: these are master weights, and somebody must write them back.

Faulty
    >>> model = Classifier()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model.head = nn.Linear(16, 3)          # the optimizer still holds the old head

Fixed
    >>> model = Classifier()
    >>> model.head = nn.Linear(16, 3)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

Known limits
    A trunk that is left out of the optimizer on purpose looks like one that was forgotten: freeze it, or name it in
    ``frozen=``.

References
    https://docs.pytorch.org/docs/stable/optim.html#constructing-it
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import be, some, them, they, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio", "every_param_moves")

PASSES_OF_A_PART = 3
"""Backward passes that must reach a parameter of a module nobody declared: copies made for one step (an unrolled model,
a client's) are no parts of the model."""

CAUSES = {
    "not_in_optimizer": "a gradient arrives at the parameter, and no optimizer holds it",
    "swapped_after_optimizer": (
        "the optimizer holds tensors that are no longer in the model, where the model has new ones that it does "
        "not hold"
    ),
    "stale_copy": "the optimizer holds none of the tensors that train, but as many others that no gradient reaches",
    "not_registered": "the parameter sits in a plain list, tuple or dict, where parameters() does not find it",
    "held_twice": "one group holds the same tensor more than once",
}


@check(needs={"run"}, causes=CAUSES, rank=10)
def optimizer_holds_every_param(evidence: Evidence) -> Iterator[Finding]:
    record = evidence.run()
    if not record.optimizers:
        raise CannotDecide("no torch optimizer was given or seen; pass TrainLoop.optimizer if there is one")
    twice = list(_held_twice(record))
    yield from twice
    if not twice and not record.autograd_passes() and record.raised is None:
        raise CannotDecide(
            f"no backward pass was seen in {record.items} batches: which parameters train is told by gradients only"
        )
    missing = [p for p in record.parameters if _is_missing(record, p)]
    if not missing:
        return
    missing += [p for p in record.parameters if p not in missing and _silent_sibling(record, p, missing)]
    left_over = _left_over(record)
    unregistered = [p for p in missing if p.role == "unregistered"]
    registered = [p for p in missing if p.role != "unregistered"]
    if unregistered:
        yield _not_registered(unregistered, _where(record))
    if registered and left_over:
        yield _replaced(record, registered, left_over)
    elif registered and not _follows_later(evidence, record, registered):
        yield _missing(record, registered, "advice" if _may_be_meant(record, registered) else "fault")


def _is_missing(record: Record, p: Parameter) -> bool:
    if p.role == "foreign" or p.index in record.held:
        return False
    if record.declared_frozen(p.name):
        return False
    passes = sum(any(not a.incoming.zero for a in b.arrivals.get(p.index, ())) for b in record.backwards())
    if passes < (1 if p.declared else PASSES_OF_A_PART):
        return False
    moved = p.index in record.moved_outside_steps() or not p.start.same(record.end.get(p.index))
    others_train = any(q.calls_with_grad > q.calls_in_eval for q in record.parameters if q is not p)
    fixed_part = p.calls_with_grad > 0 and p.calls_in_eval == p.calls_with_grad and others_train
    return not moved and not fixed_part


def _silent_sibling(record: Record, p: Parameter, missing: Sequence[Parameter]) -> bool:
    """Whether a parameter beside missing ones gets gradients that are zero only so far (LoRA's A behind a zero B)."""
    beside = any(p.owner == m.owner and p.role == m.role for m in missing)
    return beside and p.index not in record.held and any(True for _ in record.arrivals(p.index))


def _left_over(record: Record) -> list[Parameter]:
    """Held tensors that no gradient reaches and that stand in no module that ran."""
    held = record.held
    ran = [p for p in record.parameters if p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint > 0]
    silent = [p for p in record.parameters if p.index in held and not record.reached(p.index)]
    return [p for p in silent if p.role == "foreign" or p.gone or (p not in ran and any(not q.declared for q in ran))]


def _held_twice(record: Record) -> Iterator[Finding]:
    for optimizer in record.optimizers:
        twice = [i for i, n in Counter(optimizer.parameters).items() if n > 1]
        if twice:
            names = record.names(twice)
            yield Finding(
                cause="held_twice",
                summary=(
                    f"{optimizer.kind} holds {some(names)} more than once, so every step updates {them(names)} more "
                    "than once"
                ),
                measured=f"{len(optimizer.parameters)} entries in its groups, {len(set(optimizer.parameters))} tensors",
                shown_by="the same tensor stands in the groups repeatedly",
                culprits=names,
                where=_where(record, optimizer.index),
                repair="pass each parameter once: model.parameters() already leaves out repeated (tied) ones",
                explains=CONSEQUENCES,
            )


def _not_registered(unregistered: Sequence[Parameter], where: str) -> Finding:
    names = tuple(p.name for p in unregistered)
    return Finding(
        cause="not_registered",
        summary=(
            f"{some(names)} {verb(names, 'get')} gradients but {be(names)} in no optimizer: the model never "
            f"registered {them(names)}"
        ),
        measured=f"{len(names)} parameters in plain lists, tuples or dicts",
        shown_by="gradients arrive there, and model.parameters() does not have them",
        culprits=names,
        where=where,
        repair=(
            "use nn.ModuleList, nn.ModuleDict or nn.ParameterList, so that parameters(), to() and state_dict() "
            "find them"
        ),
        explains=CONSEQUENCES,
    )


def _replaced(record: Record, missing: Sequence[Parameter], left_over: Sequence[Parameter]) -> Finding:
    names = tuple(p.name for p in missing)
    trained = [p for p in record.parameters if p.index in record.held and record.reached(p.index)]
    measured = (
        f"the optimizer holds {len(left_over)} tensors that no gradient reaches; {len(names)} parameters that get "
        "gradients are in no optimizer"
    )
    if not trained:
        return Finding(
            cause="stale_copy",
            summary=(
                f"the optimizer holds none of the {len(names)} parameters that train: it was built on another copy "
                "of the model"
            ),
            measured=measured,
            shown_by="gradients arrive at the running model's tensors only; the optimizer's own get none",
            culprits=names,
            repair=(
                "build the optimizer after the last copy, re-wrap or rebuild of the model, from that model's "
                "parameters()"
            ),
            explains=CONSEQUENCES,
        )
    return Finding(
        cause="swapped_after_optimizer",
        summary=(
            f"{some(names)} {be(names)} in no optimizer: {they(names)} replaced tensors that the optimizer still holds"
        ),
        measured=measured,
        shown_by="the optimizer's tensors "
        + ", ".join(str(p.shape) for p in list(left_over)[:3])
        + " are in no module any more",
        culprits=names,
        where=_where(record),
        repair=(
            "change the model first (new head, resized embedding), then build the optimizer; or add_param_group "
            "for the new part"
        ),
        explains=CONSEQUENCES,
    )


def _may_be_meant(record: Record, missing: Sequence[Parameter]) -> bool:
    """Whether what is missing may be a fixed function: nets that were not handed over as the model (a perceptual
    net), or
    a model around something that is optimised in its stead (an image, a latent code)."""
    if not any(p.declared for p in missing) and any(p.declared for p in record.parameters):
        return True
    trained = [p for p in record.parameters if p.index in record.held and record.reached(p.index)]
    return any(True for p in trained for _ in record.arrivals(p.index)) and all(p.role == "foreign" for p in trained)


def _steps_copies(record: Record) -> bool:
    """Whether what is stepped are tensors beside the model with gradients put there by hand: master weights, one flat
    vector."""
    trained = [p for p in record.parameters if p.index in record.held and record.reached(p.index)]
    return bool(trained) and all(p.role == "foreign" and not any(record.arrivals(p.index)) for p in trained)


def _follows_later(evidence: Evidence, record: Record, missing: Sequence[Parameter]) -> bool:
    """Whether copies that are stepped in the parameters' stead are written into the model after more steps than were
    watched."""
    from pytest_trainloop.runs.further_runs import longer_run

    if not _steps_copies(record):
        return False
    names = {p.name for p in missing}
    longer = evidence.shared(longer_run)
    return any(p.name in names and p.index in longer.changed() for p in longer.parameters)


def _missing(record: Record, missing: Sequence[Parameter], level: Level) -> Finding:
    names = tuple(p.name for p in missing)
    trainable = [p for p in record.parameters if p.requires_grad and p.role != "foreign"]
    copies = _steps_copies(record)
    return Finding(
        cause="not_in_optimizer",
        level=level,
        summary=(
            f"{some(names)} {verb(names, 'get')} gradients but {be(names)} in no optimizer, so {they(names)} never "
            f"{verb(names, 'train')}"
        ),
        measured=f"{len(names)} of {len(trainable)} trainable parameters are held by no optimizer",
        shown_by="gradients that are not zero arrive there, no optimizer holds them, and nothing else moved them"
        + ("; what the optimizer steps stands beside the model, and nothing writes it back" if copies else ""),
        culprits=names,
        where=_where(record),
        repair=(
            "write the tensors that the optimizer steps back into the model after every step (p.copy_(master)), or "
            "pass it the model's own parameters"
            if copies
            else "pass them to the optimizer; if they are meant to stay fixed, say so: "
            'requires_grad_(False), or frozen=("...",)'
        ),
        explains=CONSEQUENCES,
    )


def _where(record: Record, optimizer: int | None = None) -> str:
    """The line of the first step, of this optimizer or of any."""
    steps = (s for s in record.innermost_steps() if optimizer in (None, s.optimizer))
    return next((str(s.place) for s in steps), "")
