"""The declared parts add up to the loss that is trained.

What it does
    At several steps it evaluates ``parts(model, batch)`` at the weights, the batch and the random state of what the
    loop backpropagates, and compares values and gradients.

Why is this bad?
    A term that is logged and never added, or added at another weight, looks right in every plot: its curve moves, since
    the other terms move it. What the loop trains is not what is reported.

How it decides
    In float64, without dropout, both are functions of weights and batch. The gradient of the loss is written as a
    weighted sum of the gradients of its parts, by least squares; what is left is below 1e-9, or the parts are not all.
    The weights found are the diagnosis: 0 for a term that is left out, 0.1 for one that is declared at (1.0, value). A
    term that is given without a weight may be a logged one, which the loop weights in its sum: a constant weight other
    than 1 is advice, a weight of 0 or -1 a fault. A factor that all terms share (1/k under accumulation, the scale of a
    scaler) is no fault, nor is a weight that moves from step to step (annealing, weights that are learned). A fault is
    confirmed at further weights and batches, as many as there are parts and three more. A term that the value holds and
    the gradient does not is detached.
    Losses of one batch that are backpropagated one by one, or by rows, are added up first. Terms that are numbers
    without a history are judged by their values alone.

Faulty
    >>> centre = lambda model, batch: 0.01 * model(batch[0]).square().mean()
    >>> parts = lambda model, batch: {"ce": F.cross_entropy(model(batch[0]), batch[1]), "centre": centre(model, batch)}
    >>> for batch in batches:
    ...     optimizer.zero_grad()
    ...     parts(model, batch)["ce"].backward()                          # not the sum
    ...     optimizer.step()

Fixed
    >>> centre = lambda model, batch: 0.01 * model(batch[0]).square().mean()
    >>> parts = lambda model, batch: {"ce": F.cross_entropy(model(batch[0]), batch[1]), "centre": centre(model, batch)}
    >>> for batch in batches:
    ...     optimizer.zero_grad()
    ...     sum(parts(model, batch).values()).backward()
    ...     optimizer.step()

Known limits
    ``parts`` has to compute its terms as the loop does: with the same draws, in the same order. Terms that only begin
    later in training are declared with their weight of now: (0.0, value).

References
    https://arxiv.org/abs/1705.07115
    https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.loss.loss_components.causes import CAUSES, found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check
from pytest_trainloop.core.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_components.weights import Weight
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

_CAUSE = {
    "detached": "part_detached",
    "left_out": "part_left_out",
    "negated": "sign_differs",
    "differs": "weight_differs",
    "constant": "part_constant",
}


@check(needs={"fit", "parts"}, causes=CAUSES, rank=30, steps=5, names="part of the loss")
def loss_components(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_components.weights import judged

    if not evidence.repeatable:
        raise CannotDecide("whether parts add up takes runs of their own: return a TrainLoop from a marked test")
    made = evidence.shared(judged)
    names = [w.name for w in made.weights]
    facts: dict[str, Any] = {"states": made.states, "what": "value" if made.by_value else "gradient"}
    facts |= {"coefficients": ", ".join(f"{w.name} {_coefficient(w)}" for w in made.weights)}
    facts |= {"factor": made.factor, "scaled": abs(made.factor - 1) > 1e-6}
    facts |= {"left": made.residual, "fitted": not math.isnan(made.residual)}
    # parts without a weight of their own, as projects log them, which are weighted in the sum
    logged = [weight for weight in made.weights if weight.how == "differs" and weight.bare]
    for weight in made.weights:
        if weight.how in _CAUSE and weight not in logged:
            others = [name for name in names if name != weight.name]
            own: dict[str, Any] = {"own": weight.declared != 1, "declared": weight.declared, "trained": weight.found}
            own |= {"value": weight.value, "others": some(others, most=3) if others else "nothing"}
            own |= {"pair": f"{{{_pair(weight)}}}", "level": "advice" if weight.how == "constant" else "fault"}
            if weight.how == "constant":
                own["repair"] = f"{weight.name} stays {weight.value:.4g} whatever the weights are: "
                own["repair"] += CAUSES["part_constant"].repair
            variant = "named" if weight.how in ("left_out", "negated", "differs") else ""
            yield found(_CAUSE[weight.how], made.place, (weight.name,), variant, **facts, **own)
    if logged:
        each = some([f"{w.name} is trained at {w.found:.4g}" for w in logged], most=4)
        own = {"each": each, "pair": f"{{{', '.join(map(_pair, logged))}}}", "level": "advice"}
        yield found("weight_differs", made.place, [w.name for w in logged], "logged", **facts, **own)
    if made.unreported is not None:
        yield made.unreported


def _coefficient(weight: Weight) -> str:
    if not math.isnan(weight.found):
        return f"{weight.found:.4g}"
    return "moving" if weight.how == "anneals" else "(no slope)"


def _pair(weight: Weight) -> str:
    return f'"{weight.name}": ({weight.found:.4g}, {weight.name})'
