"""What is backpropagated, compared with the losses that were computed: sign flipped, detached, left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, judges
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import ADDITIONS, DIVISIONS, JOINS, LOSSES, MULTIPLICATIONS, NEGATIONS
from pytest_trainloop.tracing.provenance_queries import layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.tracing.provenance import Node

_ADDS = ADDITIONS | JOINS | {"sub", "__sub__", "sum", "mean"}
_SCALES = (MULTIPLICATIONS - {"multiply", "__rmul__"}) | (DIVISIONS - {"true_divide", "divide", "__div__"}) | NEGATIONS


@judges(*LOSSES)
def maximised(call: Call) -> Iterator[Judgement]:
    """A loss that is maximised: a negative multiple of it, and nothing else, is backpropagated."""
    if call.root is None or call.weights is None:
        return
    weights, values = call.weights.detach().double(), call.out.detach().double()
    if weights.shape != values.shape or not bool((weights <= 0).all()) or not bool((weights < 0).any()):
        return
    alone = abs(float((weights * values).sum()) - call.root) <= 1e-4 * abs(call.root)
    target = call.given.get("target")
    if alone and not (isinstance(target, torch.Tensor) and target.requires_grad):
        yield _sign_flipped(call, alone=True)
    else:
        yield _sign_flipped(call, alone=False)


@judges("gather")
def minimised_likelihood(call: Call) -> Iterator[Judgement]:
    """Log-probabilities gathered by label, whose mean is minimised without a minus."""
    node = call.node("input")
    if call.root is None or call.weights is None or node is None or node.op != "log_softmax":
        return
    weights, values = call.weights.detach().double(), call.out.detach().double()
    if weights.shape != values.shape or not bool((weights > 0).all()):
        return
    one = bool(((weights - weights.flatten()[0]).abs() <= 1e-6 * weights.flatten()[0].abs()).all())
    if one and abs(float((weights * values).sum()) - call.root) <= 1e-4 * abs(call.root):
        yield _sign_flipped(call, alone=True)


def _sign_flipped(call: Call, *, alone: bool) -> Judgement:
    value = float(call.out.detach().double().mean())
    return call.judged(
        "sign_flipped",
        f"{call.name} is maximised: what is backpropagated {'is its negative' if alone else 'subtracts it'}",
        level="fault" if alone else "advice",
        in_every_call=True,
        measured=f"{call.name} {value:.4g}, backpropagated {call.root:.4g}",
        shown_by="the gradient of what is backpropagated with respect to it"
        + (", and their values: no other term is in it" if alone else ""),
        repair="" if alone else "add it in place of subtracting it",
    )


def is_meant(record: Record, layer: str | None) -> bool:
    """Whether a loss may be maximised on purpose: the optimizer maximises, or does not hold the layer that gave the
    scores (an attack on the inputs)."""
    return any(o.maximizes for o in record.optimizers) or not _held_below(record, layer)


def never_trained(record: Record, layer: str | None) -> bool:
    """Whether an optimizer holds the layer that gave the scores, and no gradient ever reached it."""
    held = _held_below(record, layer)
    return bool(held) and all(not any(record.arrivals(i)) for i in held)


def _held_below(record: Record, layer: str | None) -> list[int]:
    return [i for i in record.held if layer is not None and _is_of(record.parameters[i].name, layer)]


def _is_of(name: str, layer: str) -> bool:
    return name.startswith(f"{layer}.") if layer else "." not in name


def layer_of(call: Call) -> str | None:
    """The path of the layer with weights that gave the scores."""
    found = layout(call.node("input"))
    return found.layer.module if found is not None and any(p.parameter for p in found.layer.parents) else None


def without_gradient(root: Node) -> Iterator[Node]:
    """Losses whose value is added to what is backpropagated, and whose gradient is not."""
    added: list[tuple[Node, bool]] = []
    todo, seen = [(root, True)], 0
    while todo and seen < 400:
        node, alive = todo.pop()
        seen += 1
        alive = alive and node.history
        if node.op in LOSSES:
            added.append((node, alive))
        elif node.moves or node.op in _ADDS or (node.op in _SCALES and _by_number(node)):
            todo.extend((p, alive) for p in node.parents if p.floating)
    live = [node for node, alive in added if alive]
    yield from (node for node, alive in added if not alive and live and node not in live)


def _by_number(node: Node) -> bool:
    """Whether it scales by a plain number: a product of two results is no sum of loss terms."""
    return len([p for p in node.parents if p.op]) == 1


def detached(name: str, where: str) -> Finding:
    return Finding(
        cause="part_detached",
        summary=f"the value of {name} is added to what is backpropagated, and its gradient is not",
        measured="in every backward pass",
        shown_by="the sum contains it without its history, and another loss with one",
        culprits=(name,),
        where=where,
    )


def left_out(name: str, where: str, untrained: str | None, lost: str) -> Finding:
    """``untrained`` is the layer that no other loss trains; ``lost`` says how its value is lost, where that is sure."""
    shown = "no gradient reached its value, and others did"
    if untrained:
        shown += "; an optimizer holds the layer, and no gradient of the run reached it"
    if lost:
        shown += f"; {lost}"
    return Finding(
        cause="part_left_out",
        level="fault" if untrained or lost else "advice",
        summary=f"{name} is computed with a history and goes into nothing that is backpropagated"
        + (f": no other loss trains {untrained}" if untrained else f": {lost}" if lost else ""),
        measured="no gradient reaches it",
        shown_by=shown,
        culprits=(untrained or name,),
        where=where,
        repair="add it to the loss" if untrained else "add it to the loss, or delete the line" if lost else "",
    )
