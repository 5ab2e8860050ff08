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

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.optimizer_holds_every_param.causes import CAUSES, found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(
    needs={"run"}, causes=CAUSES, rank=10, steps=10, instrument="pytest_trainloop.instruments.tracing.made_at:MadeAt"
)
def optimizer_holds_every_param(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.optimizer_holds_every_param import holders

    record = evidence.run()
    if not record.optimizers:
        raise CannotDecide(
            "no torch optimizer was given or seen; pass TrainLoop.optimizer if there is one", needs="optimizer="
        )
    twice = list(holders.held_twice(evidence, record))
    yield from twice
    if not twice and not record.autograd_passes() and record.raised is None:
        raise CannotDecide(
            f"no backward pass was seen in {record.items} batches: only gradients show which parameters train"
        )
    missing = holders.missing_parameters(record)
    left_over = holders.left_over(record) if missing else []
    yield from holders.not_registered(evidence, [p.name for p in missing if p.role == "unregistered"])
    # those that came in a forward pass, under the name of one that is in no module any more
    gone = {(holders.path(p), p.shape) for p in left_over if p.gone}
    later = [p for p in missing if p.came_in is not None and (holders.path(p), p.shape) in gone]
    if later := [p for p in later if p.role != "unregistered"]:
        names = dict.fromkeys(map(holders.path, later))
        facts = {"tensors": len(later), "count": len(names), "steps": record.rounds}
        yield found("replaced_in_forward", later[0].came_in, names, **facts)
    registered = [p for p in missing if p.role != "unregistered" and p not in later]
    if registered and left_over:
        yield holders.replaced(evidence, record, registered, left_over)
    elif registered:
        yield from holders.left_out(evidence, record, registered)
