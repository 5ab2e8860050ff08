"""Every parameter that gets a gradient is held by an optimizer.

What it does
    After a watched run it compares the tensors in the optimizers' groups with the parameters that gradients arrived at.

Why is this bad?
    A head that was never passed to the optimizer, or a model that was copied after the optimizer was built, runs as if
    nothing were wrong: the loss falls a little, through the rest or not at all, and nothing is raised.

How it decides
    1. An optimizer counts from when it is built, also before its first step.
    2. A parameter is missing if it requires grad, a gradient other than zero arrived, no optimizer holds it, and
       nothing else moved it.
    3. Not missing are: what ``frozen=`` names, what stays in eval mode while the rest trains (a fixed perceptual net),
       averages, and parameters that user code steps. So is a network called on its own that once had the values of
       trained parameters, bit for bit (a target network, an old policy). Layers of one list are no copies of each
       other.
    4. Without ``frozen=``, four cases are advice. A part of a model is a copy of trained parameters. A network was
       loaded from a state dict as a whole (a teacher). The network is not declared as the model, and others are. Only
       tensors outside the model train (an image, a latent code), unless user code assigned their gradients: then they
       are master weights.

    | seen                                                                 | cause                       |
    |----------------------------------------------------------------------|-----------------------------|
    | no optimizer was given the parameter                                 | ``not_in_optimizer``        |
    | the same, while an optimizer holds tensors that get no gradient      | ``swapped_after_optimizer`` |
    | the same, and nothing that any optimizer holds gets one              | ``stale_copy``              |
    | the same, met in forward, under the name of one that left its module | ``replaced_in_forward``     |
    | a missing parameter is in no module                                  | ``not_registered``          |
    | one parameter is held twice                                          | ``held_twice``              |

When it is skipped
    It skips a loop without a torch optimizer, or without a backward pass.

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
