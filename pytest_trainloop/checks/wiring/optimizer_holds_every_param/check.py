"""Every parameter that gets a gradient is held by an optimizer.

What it does
    After a watched run it compares the tensors in the optimizers' groups with the parameters that gradients arrived at.

Why is this bad?
    A head that was never passed to the optimizer, or a model that was copied after the optimizer was built, runs as if
    nothing were wrong: the loss falls a little, through the rest or not at all, and nothing is raised.

How it decides
    An optimizer counts from when it is built, also before its first step.
    A parameter is missing iff it requires grad, a gradient that is not zero arrived at it, no optimizer holds it and
    nothing else moved it. Not missing: what ``frozen=`` names; what is kept in eval mode while the rest trains (a fixed
    perceptual net); targets that follow by an average; parameters that user code steps; a network that is called by
    itself and had the values of trained parameters at some moment, bit for bit: a target network, an old policy, a
    reference, however rarely the loop brings it up to date. A part of a model that is such a copy is advice, unless
    frozen= is given, and so is a network that was loaded from a state dict as a whole (a teacher); layers of one list
    are no copies of each other. Tensors that an optimizer holds beyond the model (a learned temperature, an image that
    is optimised) are fine as long as gradients reach them. Where only such train (an image, a latent code) the model is
    advice, unless frozen= is given, which does not name it, or user code assigned their gradients: then they are master
    weights, and somebody must write them back.
    Replaced in forward: a parameter that the optimizer holds is in no module any more, no gradient reaches it, and one
    of its name and shape, first met inside of a forward pass, gets gradients and is in no optimizer.

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

import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.consequences import TRAINING
from pytest_trainloop.checks.wiring.optimizer_holds_every_param.copies import (
    all_loaded,
    called_copies,
    copied_parts,
    path,
)
from pytest_trainloop.checks.wiring.optimizer_holds_every_param.unregistered import not_registered
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, count, some, them, they, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.optimizer_holds_every_param.copies import Pair
    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import Optimizer, Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.made_at import MadeAt

PASSES_OF_A_PART = 3
"""Backward passes that must reach a parameter of a module nobody declared: copies made for one step (an unrolled model,
a client's) are no parts of the model."""

CAUSES = {
    "not_in_optimizer": Cause(
        proof="a gradient arrives at the parameter, and no optimizer holds it",
        repair=(
            "pass them to the optimizer here, or add_param_group() where they are made\n"
            'if they are meant to stay fixed: requires_grad_(False), or frozen=("...",)'
        ),
        explains=TRAINING,
        settle='frozen=("...",) says what is not to train; given and without these it is a fault',
    ),
    "swapped_after_optimizer": Cause(
        proof=(
            "the optimizer holds tensors that are no longer in the model, and the model has new ones that it does not "
            "hold"
        ),
        repair=(
            "move this line behind the change of the model (new head, resized embedding), or add_param_group() for the "
            "new part"
        ),
        explains=TRAINING,
    ),
    "stale_copy": Cause(
        proof="the optimizer holds none of the tensors that train, but as many others that no gradient reaches",
        repair=(
            "move this line behind the last copy, re-wrap or rebuild of the model, and take that model's parameters()"
        ),
        explains=TRAINING,
    ),
    "replaced_in_forward": Cause(
        proof="the optimizer holds the parameter of the beginning; each pass makes another, which alone gets gradients",
        repair=(
            "write into the parameter (with torch.no_grad(): weight.copy_(...)), or compute with another value: "
            "F.linear(x, F.normalize(self.weight))"
        ),
        explains=(*TRAINING, "weights_are_read:layer_made_anew", "loss_at_init"),
        change=("seen",),
    ),
    "not_registered": Cause(
        proof="what holds the parameter is no nn.Module (a list, tuple, dict or plain object), and parameters() does "
        "not find it there",
        repair=(
            "nn.ModuleList([...]) in place of the list (nn.ModuleDict of a dict, nn.ParameterList of parameters), so "
            "that parameters(), to() and state_dict() find them"
        ),
        explains=TRAINING,
    ),
    "held_twice": Cause(
        proof="one group holds the same tensor more than once",
        repair="pass each parameter once: model.parameters() already leaves out repeated (tied) ones",
        explains=TRAINING,
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=10, steps=10, instrument="pytest_trainloop.tracing.made_at:MadeAt")
def optimizer_holds_every_param(evidence: Evidence) -> Iterator[Finding]:
    record = evidence.run()
    if not record.optimizers:
        raise CannotDecide(
            "no torch optimizer was given or seen; pass TrainLoop.optimizer if there is one", needs="optimizer="
        )
    twice = list(_held_twice(evidence, record))
    yield from twice
    if not twice and not record.autograd_passes() and record.raised is None:
        raise CannotDecide(
            f"no backward pass was seen in {record.items} batches: only gradients show which parameters train"
        )
    missing = [p for p in record.parameters if _is_missing(record, p)]
    targets = called_copies(record, missing)
    missing = [p for p in missing if p.index not in targets]
    if not missing:
        return
    missing += [p for p in record.parameters if p not in missing and _silent_sibling(record, p, missing)]
    left_over = _left_over(record)
    unregistered = tuple(p.name for p in missing if p.role == "unregistered")
    registered = [p for p in missing if p.role != "unregistered"]
    if unregistered:
        yield from not_registered(_made(evidence), unregistered, _first_step(record))
    later = [p for p in registered if _took_the_place(p, left_over)]
    if later:
        yield _replaced_in_forward(record, later)
        registered = [p for p in registered if p not in later]
    if registered and left_over:
        yield _replaced(evidence, record, registered, left_over)
    elif registered and not _follows_later(evidence, record, registered):
        copied = copied_parts(record, registered) if record.frozen is None else {}
        if copied:
            yield _copied(evidence, record, [p for p in registered if p.index in copied], *copied.values())
        registered = [p for p in registered if p.index not in copied]
        if registered:
            open_question = record.frozen is None and _may_be_meant(evidence, record, registered)
            yield _missing(evidence, record, registered, "advice" if open_question else "fault")


def _is_missing(record: Record, p: Parameter) -> bool:
    if p.role == "foreign" or p.index in record.held or record.declared_frozen(p.name):
        return False
    passes = sum(any(not a.incoming.zero for a in b.arrivals.get(p.index, ())) for b in record.backwards())
    if passes < (1 if p.declared else PASSES_OF_A_PART):
        return False
    moved = p.index in record.moved_outside_steps() or not p.start.same(record.end.get(p.index))
    others_train = any(q.calls_with_grad > q.calls_in_eval for q in record.parameters if q is not p)
    fixed_part = p.calls_with_grad > 0 and p.calls_in_eval == p.calls_with_grad and others_train
    return not moved and not fixed_part


def _silent_sibling(record: Record, p: Parameter, missing: Sequence[Parameter]) -> bool:
    """Whether a parameter of the same module as missing ones gets gradients that are only zero so far (LoRA's A behind
    a zero B)."""
    sibling = any(p.owner == m.owner and p.role == m.role for m in missing)
    return sibling and p.index not in record.held and any(True for _ in record.arrivals(p.index))


def _left_over(record: Record) -> list[Parameter]:
    """Held tensors that no gradient reaches and that are in no module that ran."""
    held = record.held
    ran = [p for p in record.parameters if p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint > 0]
    silent = [p for p in record.parameters if p.index in held and not record.reached(p.index)]
    return [p for p in silent if p.role == "foreign" or p.gone or (p not in ran and any(not q.declared for q in ran))]


def _held_twice(evidence: Evidence, record: Record) -> Iterator[Finding]:
    for optimizer in record.optimizers:
        names = record.names([i for i, n in Counter(optimizer.parameters).items() if n > 1])
        if names:
            yield Finding(
                cause="held_twice",
                summary=(
                    f"{optimizer.kind} holds {some(names)} more than once, so every step updates {them(names)} more "
                    "than once"
                ),
                measured=f"{len(optimizer.parameters)} entries in its groups, {len(set(optimizer.parameters))} tensors",
                shown_by="its groups hold the same tensor repeatedly",
                culprits=names,
                where=_first_step(record, optimizer.index),
                change=_made(evidence).group(optimizer.index),
            )


def _trained(record: Record) -> list[Parameter]:
    return [p for p in record.parameters if p.index in record.held and record.reached(p.index)]


def _replaced(
    evidence: Evidence, record: Record, missing: Sequence[Parameter], left_over: Sequence[Parameter]
) -> Finding:
    names = tuple(p.name for p in missing)
    made, holder = _made(evidence), _holder(record, left_over)
    measured = (
        f"the optimizer holds {len(left_over)} tensors that no gradient reaches; {len(names)} parameters that get "
        "gradients are in no optimizer"
    )
    if not _trained(record):
        return Finding(
            cause="stale_copy",
            summary=(
                f"the optimizer holds none of the {len(names)} parameters that train: it was built on another copy "
                "of the model"
            ),
            measured=measured,
            shown_by="gradients arrive at the running model's tensors only; the optimizer's own get none",
            culprits=names,
            where=_first_step(record, holder),
            change=made.optimizer(holder),
        )
    shapes = some([str(p.shape) for p in left_over], most=3)
    return Finding(
        cause="swapped_after_optimizer",
        summary=(
            f"{some(names)} {be(names)} in no optimizer: {they(names)} replaced tensors that the optimizer still holds"
        ),
        measured=measured,
        shown_by=f"the optimizer's tensors {shapes} are in no module any more"
        + (f"; {missing[0].owner} was made at {new}" if (new := made.module(missing[0].owner)) else ""),
        culprits=names,
        where=_first_step(record, holder),
        change=made.optimizer(holder),
    )


def _took_the_place(p: Parameter, left_over: Sequence[Parameter]) -> bool:
    """Whether a parameter that came in a forward pass has the name and shape of one that is in no module any more."""
    return p.came_in is not None and any(q.gone and path(q) == path(p) and q.shape == p.shape for q in left_over)


def _replaced_in_forward(record: Record, later: Sequence[Parameter]) -> Finding:
    names = tuple(dict.fromkeys(map(path, later)))
    return Finding(
        cause="replaced_in_forward",
        summary=f"{some(names)} {be(names)} replaced by a new Parameter inside of the forward pass, and the optimizer "
        "steps the one of the beginning",
        measured=f"{len(later)} other tensors were met under {count(len(names), 'name')} in {record.rounds} steps",
        shown_by="gradients arrive at the new ones only, no optimizer holds them, and the held one is in no module",
        culprits=names,
        where=str(later[0].came_in),
    )


def _holder(record: Record, held: Sequence[Parameter]) -> int:
    """The optimizer that holds the first of these."""
    return record.held[held[0].index][0]


def _may_be_meant(evidence: Evidence, record: Record, missing: Sequence[Parameter]) -> bool:
    """Whether what is missing may be a fixed function: nets that were not declared as the model (a perceptual net),
    those that were loaded from a state dict (a teacher), or a model around something that is optimised in its stead (an
    image, a latent code)."""
    if not any(p.declared for p in missing) and any(p.declared for p in record.parameters):
        return True
    trained = _trained(record)
    if any(True for p in trained for _ in record.arrivals(p.index)) and all(p.role == "foreign" for p in trained):
        return True
    return all_loaded(record, missing, _made(evidence))


def _steps_copies(record: Record) -> bool:
    """Whether what is stepped are tensors outside the model whose gradients user code assigned: master weights, one
    flat vector."""
    trained = _trained(record)
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


def _missing(evidence: Evidence, record: Record, missing: Sequence[Parameter], level: Level) -> Finding:
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
        + ("; the optimizer steps tensors outside the model, and nothing writes them back" if copies else ""),
        culprits=names,
        where=_first_step(record),
        change=_made(evidence).group(_nearest(record, missing[0])),
        repair=(
            "write the tensors that the optimizer steps back into the model after every step (p.copy_(master)), or "
            "pass it the model's own parameters"
            if copies
            else ""
        ),
    )


def _copied(evidence: Evidence, record: Record, missing: Sequence[Parameter], pair: Pair, *_others: Pair) -> Finding:
    """Of parts that began with the values of parts that train: as target networks do, which must not be stepped."""
    finding = _missing(evidence, record, missing, "advice")
    names = finding.culprits
    return replace(
        finding,
        summary=f"{some(names)} {verb(names, 'get')} gradients and {be(names)} in no optimizer; {pair.copy} began with "
        f"the values of {pair.original}",
        shown_by=f"in {count(record.rounds, 'step')} no optimizer held {them(names)}, and nothing else moved "
        f"{them(names)}; the values of {pair.copy} and {pair.original} were equal bit for bit",
        repair=f"if {pair.copy} is to train, pass its parameters to the optimizer here\n"
        f"if it is a target network that follows {pair.original}: {pair.copy}.requires_grad_(False)",
    )


def _nearest(record: Record, missing: Parameter) -> int:
    """The optimizer that holds what is nearest to a parameter in the model: of several, one of the same part."""

    own = missing.name.split(".")

    def shared(optimizer: Optimizer) -> int:
        names = (record.name(i).split(".") for i in optimizer.parameters)
        same = (itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, own, strict=False)) for name in names)
        return max((len(list(parts)) for parts in same), default=0)

    return max(record.optimizers, key=shared).index


def _made(evidence: Evidence) -> MadeAt:
    from pytest_trainloop.tracing.made_at import MadeAt

    return evidence.shared(MadeAt.of)


def _first_step(record: Record, optimizer: int | None = None) -> str:
    """The line of the first step, of this optimizer or of any."""
    steps = (s for s in record.innermost_steps() if optimizer in (None, s.optimizer))
    return next((str(s.place) for s in steps), "")
