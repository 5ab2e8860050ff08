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
    ...     parts(model, batch)["ce"].backward()                          # the sum was meant
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
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import share, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_components.judged import Judged, Weight
    from pytest_trainloop.checks.loss.loss_components.unreported import Unreported
    from pytest_trainloop.runs.evidence import Evidence

_DROPPED = (
    "gradient_reaches_every_param:parameter_unused",
    "loss_contract:part_left_out",
    "every_term_trains:term_left_out",
)
"""What other checks see of a term that trains nothing: its layer, or its result, is used by nobody."""

CAUSES = {
    "part_detached": Cause(
        proof="the value of the loss holds the part, the part changes with the weights, and the gradient of the loss "
        "is the sum of the other parts' gradients",
        repair="leave out the detach(), no_grad() or item() on its way into the sum",
        explains=("gradient_reaches_every_param:graph_cut", "every_term_trains:term_detached", *_DROPPED),
    ),
    "part_left_out": Cause(
        proof="the gradient of the loss is the sum of the other parts' gradients, at all weights and batches",
        repair="add it to what is backpropagated, or take it out of parts=",
        explains=_DROPPED,
        settle='a term that begins later: declare it with its weight of now, {"kl": (0.0, kl)}',
    ),
    "sign_differs": Cause(
        proof="the gradient of the loss holds the part's gradient with the opposite sign",
        repair='turn the sign in the loop, or declare it: {"entropy": (-1.0, entropy)}',
    ),
    "weight_differs": Cause(
        proof="the gradient of the loss holds the part's gradient at a constant weight, which is not the declared one",
        repair='declare the weight, {"kl": (0.1, kl)}, or train at the one that is declared',
        settle="a declared weight, (weight, value), is judged: another one in the loop is a fault",
    ),
    "part_constant": Cause(
        proof="the part is the same number at all weights, with dropout too: it has no history, or is exactly 0",
        repair="look at what it is computed from: a copy of the weights, results under no_grad(), labels alone; two "
        "sides of a comparison that are the same tensor; a mask or a margin that lets nothing through",
        settle="a term that is off for now: declare its weight, (0.0, value)",
    ),
    "something_unreported": Cause(
        proof="no weights make the gradient of the loss a sum of the parts' gradients",
        repair='name what is missing as a part of its own, {"rest": ...}, or take it out of the loss; or compute the '
        "parts from the inputs that the loop gives its model",
    ),
}

_CAUSE = {
    "detached": "part_detached",
    "left_out": "part_left_out",
    "negated": "sign_differs",
    "differs": "weight_differs",
    "constant": "part_constant",
}


@check(needs={"fit", "parts"}, causes=CAUSES, rank=30, steps=5, names="part of the loss")
def loss_components(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_components.judged import judged

    if not evidence.repeatable:
        raise CannotDecide("whether parts add up takes runs of their own: return a TrainLoop from a marked test")
    found = evidence.shared(judged)
    logged = [weight for weight in found.weights if weight.how == "differs" and weight.bare]
    for weight in found.weights:
        if weight.how in _CAUSE and weight not in logged:
            yield _wrong(found, weight)
    if logged:
        yield _logged(found, logged)
    if found.unreported is not None:
        yield _unreported(found, found.unreported)


def _wrong(found: Judged, weight: Weight) -> Finding:
    name = weight.name
    others = [w.name for w in found.weights if w.name != name]
    declared = f"declared at {weight.declared:.4g}" if weight.declared != 1 else "reported at 1"
    summary = {
        "detached": f"{name} is in the loss and trains nothing: its gradient is cut off",
        "left_out": f"{name} is reported and is not in the loss that is trained: its weight there is 0",
        "negated": f"{name} is {declared} and trained at {weight.found:.4g}: with the opposite sign",
        "differs": f"{name} is {declared} and trained at {weight.found:.4g}",
        "constant": f"{name} is {weight.value:.4g} at all weights: it trains nothing",
    }[weight.how]
    return Finding(
        cause=_CAUSE[weight.how],
        level="advice" if weight.how == "constant" else "fault",
        summary=summary,
        measured=_measured(found),
        shown_by=_shown(found, weight, others),
        culprits=(name,),
        where=found.place,
        repair=_repair(weight),
    )


def _logged(found: Judged, logged: list[Weight]) -> Finding:
    """Parts without a weight of their own, as projects log them, which are weighted in the sum."""
    pairs = ", ".join(f'"{w.name}": ({w.found:.4g}, {w.name})' for w in logged)
    return Finding(
        cause="weight_differs",
        level="advice",
        summary="the loss weights parts that are given without a weight: "
        + some([f"{w.name} is trained at {w.found:.4g}" for w in logged], most=4),
        measured=_measured(found),
        shown_by="with these weights the parts give the loss, at moved weights and other batches too",
        culprits=tuple(w.name for w in logged),
        where=found.place,
        repair=f"declare the weights that are meant: parts={{{pairs}}}",
    )


def _repair(weight: Weight) -> str:
    if weight.how == "differs":
        pair = f'{{"{weight.name}": ({weight.found:.4g}, {weight.name})}}'
        return f"if {weight.found:.4g} is meant: parts={pair}; if not, train at {weight.declared:.4g}"
    if weight.how == "negated":
        return f'turn the sign in the loop; or {{"{weight.name}": ({weight.found:.4g}, {weight.name})}} if it is meant'
    if weight.how == "constant":
        return f"{weight.name} stays {weight.value:.4g} whatever the weights are: {CAUSES['part_constant'].repair}"
    if weight.how == "left_out":
        return f"loss = ... + {weight.name}; or take {weight.name} out of parts="
    return ""


def _measured(found: Judged) -> str:
    weights = ", ".join(f"{w.name} {_weight(w)}" for w in found.weights)
    factor = f", all times {found.factor:.4g}" if abs(found.factor - 1) > 1e-6 else ""
    what = "value" if found.by_value else "gradient"
    left = f"; unexplained part of the {what} {found.residual:.0e}" if not math.isnan(found.residual) else ""
    return f"coefficients fitted over {found.states} settings of the model's weights: {weights}{factor}{left}"


def _weight(weight: Weight) -> str:
    if not math.isnan(weight.found):
        return f"{weight.found:.4g}"
    return "moving" if weight.how == "anneals" else "(no slope)"


def _shown(found: Judged, weight: Weight, others: list[str]) -> str:
    rest = some(others, most=3) if others else "nothing"
    if weight.how == "detached":
        return f"the value of the loss changes with {weight.name}; its gradient is that of {rest} alone"
    if weight.how == "left_out":
        return f"{rest} alone give the {'value' if found.by_value else 'gradient'} of the loss, at moved weights too"
    if weight.how == "constant":
        return "the weights were moved by 10 % and by 30 %, and it stayed the same"
    return f"with {weight.name} at {weight.found:.4g} the parts give the loss, at moved weights and other batches too"


def _unreported(found: Judged, rest: Unreported) -> Finding:
    decayed = not math.isnan(rest.decay)
    names = some(rest.names) or "the weights"
    if decayed:
        what = f": it holds {rest.decay:.3g} times the sum of the squares of {names}"
    elif rest.outside:
        what = f": it holds something that trains {names}, which no part reaches"
    else:
        what = f": no weights of them give its gradient, most visibly that of {rest.names[0]}" if rest.names else ""
    return Finding(
        cause="something_unreported",
        summary=f"the loss is not the sum of its parts{what}",
        measured=(
            f"the loss is {rest.root:.6g}, its parts add up to {rest.root - rest.value:.6g}"
            + ("" if rest.by_value else f"; {share(rest.share)} of its gradient is left when theirs are taken away")
        ),
        shown_by="both were taken at equal weights, batch and draws, in float64",
        culprits=tuple(w.name for w in found.weights),
        where=found.place,
        repair=f'report it as a part: "decay": {rest.decay:.3g} * sum(p.pow(2).sum() for p in ...)' if decayed else "",
    )
