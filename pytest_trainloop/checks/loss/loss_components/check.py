"""The declared parts add up to the loss that is trained.

What it does
    At several steps it evaluates ``parts(model, batch)`` at the weights, the batch and the random state of what the
    loop backpropagates, and compares values and gradients.

Why is this bad?
    A term that is logged and never added, or added at another weight, looks right in every plot: its curve moves, since
    the other terms move it. What the loop trains is not what is reported.

How it decides
    1. In float64, without dropout, loss and parts are functions of weights and batch. Losses backpropagated one by one,
       or by rows, are added up first.
    2. Least squares write the gradient of the loss as a weighted sum of the gradients of its parts
       (docs/how-it-decides.md#terms-that-add-up). What is left must be below 1e-9.
    3. Further weights and batches must confirm a fault, as many as there are parts and three more.
    4. A factor that all terms share (1/k, a scaler's scale) is no fault, nor is a weight that moves from step to step
       (annealing).
    5. Terms that are numbers without a history are judged by their values alone.

    | weights found                                    | cause                    | advice if              |
    |--------------------------------------------------|--------------------------|------------------------|
    | more than 1e-9 is left                           | ``something_unreported`` |                        |
    | 0                                                | ``part_left_out``        |                        |
    | -1                                               | ``sign_differs``         |                        |
    | 0.1 for one declared at (1.0, value)             | ``weight_differs``       | given without a weight |
    | the value holds a term and the gradient does not | ``part_detached``        |                        |
    | a part stays constant whatever the weights are   | ``part_constant``        | always                 |

When it is skipped
    It skips a single watched run, and a loss that cannot be differentiated together with its parts.

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
