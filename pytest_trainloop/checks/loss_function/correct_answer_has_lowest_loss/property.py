"""Does the right answer cost no more than a wrong one?

A right answer is compared with the same answer given to another class: both have the same confidence, the same
smoothing and the same weights, so that only the target tells them apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.losses.alignment import require_aligned
from pytest_trainloop.losses.calls import same
from pytest_trainloop.losses.search import Seen
from pytest_trainloop.strategies.loss_cases import Case, Inputs, class_axis, inputs_of, views_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.losses.evidence import Loss

SURE = 0.9
"""The probability that an answer gives its class."""

AWAY = (1.0, 10.0, 100.0)
"""How far outputs are moved away from the target, in both directions."""


def look(loss: Loss, case: Case) -> Seen | None:
    """Where a wrong answer is cheaper than the right one, or the target does not matter."""
    require_aligned(loss, case)
    inputs = inputs_of(loss.contract, case)
    unused = _unused(loss, inputs)
    if unused is not None:
        return unused
    if loss.contract.expects == "values":
        return _values(loss, inputs)
    right, *wrong = [(told, _cost(loss, answer)) for told, answer in _answers(loss, inputs)]
    if not all(math.isfinite(cost) for _, cost in (right, *wrong)):
        raise CannotDecide("the value is not finite")
    cheapest = min(wrong, key=lambda pair: pair[1])
    size = 1.0 + max(abs(cost) for _, cost in (right, *wrong))
    if cheapest[1] >= right[1] or same(cheapest[1], right[1], size):
        return None
    measured = f"the right answer costs {right[1]:.6g}, {cheapest[0]} {cheapest[1]:.6g}"
    if all(cost < right[1] for _, cost in wrong):
        return Seen(
            cause="reversed",
            summary="the right answer costs more than every wrong one",
            measured=measured,
            shown_by=f"{len(wrong)} wrong answers of the same confidence were compared",
        )
    return Seen(
        cause="other_class",
        summary=f"{cheapest[0]} costs less than the right answer",
        measured=measured,
        shown_by="other wrong answers cost more: the target is taken for another class",
    )


def _cost(loss: Loss, inputs: Inputs) -> float:
    return loss.wide(inputs, grad=False).total


def _unused(loss: Loss, inputs: Inputs) -> Seen | None:
    """Whether the value is the same whatever the targets are."""
    target = inputs.target
    if target is None:
        others = [Inputs((inputs.outputs[0], *other), None) for other in _other_views(loss, inputs)]
    elif loss.contract.expects == "embeddings":
        return None
    else:
        others = [Inputs(inputs.outputs, other) for other in _other_targets(loss, target)]
    start = _cost(loss, inputs)
    size = 1.0 + abs(start)
    if not math.isfinite(start):
        raise CannotDecide("the value is not finite")
    if not others or not all(same(_cost(loss, other), start, size) for other in others):
        return None
    return Seen(
        cause="target_unused",
        summary="the value does not depend on the target",
        measured=f"{start:.6g} for {len(others) + 1} different targets of one output",
        shown_by="nothing but the targets was changed"
        if target is not None
        else "nothing but the outputs after the first was changed",
    )


def _other_views(loss: Loss, inputs: Inputs) -> Iterator[tuple[torch.Tensor, ...]]:
    """Other second halves of a pair: those of two other cases."""
    for seed in (101, 102):
        case = Case(inputs.outputs[0].shape[0], seed=seed)
        yield inputs_of(loss.contract, case).outputs[1:]


def _other_targets(loss: Loss, target: torch.Tensor) -> Iterator[torch.Tensor]:
    contract = loss.contract
    if contract.target == "index":
        classes = [c for c in range(contract.num_classes or 2) if c != contract.ignore_index]
        yield from (torch.full_like(target, c) for c in classes)
    elif contract.target == "binary":
        yield from (torch.full_like(target, label) for label in contract.labels)
    elif contract.target == "distribution":
        yield from (target.roll(k, class_axis(contract)) for k in range(1, target.shape[class_axis(contract)]))
    else:
        yield from (target.flip(0), target[:1].expand(target.shape).clone())


def _answers(loss: Loss, inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """The right answer, then wrong ones that differ from it in one row."""
    contract = loss.contract
    if contract.expects == "embeddings":
        yield from _embeddings(loss, inputs)
    elif contract.target == "index" and inputs.target is not None:
        for k in range(contract.num_classes or 2):
            answered = inputs.target.clone()
            answered.view(-1)[0] = (answered.view(-1)[0] + k) % (contract.num_classes or 2)
            hot = torch.nn.functional.one_hot(answered, contract.num_classes or 2).movedim(-1, class_axis(contract))
            yield f"class t + {k}", _given(loss, inputs, hot.to(torch.float64))
    elif contract.target == "binary" and inputs.target is not None:
        for k in (0, 1):
            high = inputs.target == max(contract.labels)
            high.view(-1)[0] = high.view(-1)[0] != bool(k)
            yield "the other label", _given(loss, inputs, high.to(torch.float64))
    else:
        yield from _turned(loss, inputs)


def _given(loss: Loss, inputs: Inputs, hot: torch.Tensor) -> Inputs:
    """An answer in the form that the contract expects: 0.9 where ``hot`` is 1."""
    contract = loss.contract
    if contract.target == "binary":
        chance = 1.0 - SURE + (2.0 * SURE - 1.0) * hot
        logits = chance.logit()
    else:
        rest = (1.0 - SURE) / ((contract.num_classes or 2) - 1)
        chance = rest + (SURE - rest) * hot
        logits = chance.log()
    low, high = contract.output_range
    if contract.expects == "logits" and (math.isfinite(low) or math.isfinite(high)):
        low, high = (low, high) if math.isfinite(low) and math.isfinite(high) else (-SURE, SURE)
        logits = low + (high - low) * (0.1 + 0.8 * hot)
    form = {"probabilities": chance, "log_probabilities": chance.log()}.get(contract.expects, logits)
    return Inputs((form, *(form for _ in inputs.outputs[1:])), inputs.target)


def _turned(loss: Loss, inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """The target itself as the answer, and with the classes of its first row turned round."""
    axis = class_axis(loss.contract)
    if inputs.target is None:
        meant = inputs.outputs[-1]
    else:
        meant = inputs.target.log() if loss.contract.expects != "probabilities" else inputs.target
    for k in range(meant.shape[axis]):
        answer = meant.clone()
        answer[:1] = meant[:1].roll(k, axis)
        outputs = (answer, *inputs.outputs[1:]) if inputs.target is None else (answer,) * len(inputs.outputs)
        yield f"the target turned by {k} classes", Inputs(outputs, inputs.target)


def _embeddings(loss: Loss, inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    contract, rows = loss.contract, inputs.outputs[0].shape[0]
    if contract.target in ("binary", "value"):
        raise CannotDecide("whether a high label says near or far is not known of two embeddings")
    if contract.target == "index" and inputs.target is not None:
        if _has_a_frame(loss, inputs):
            raise CannotDecide("the criterion has directions of its own (proxies), so no answer is known to be right")
        if contract.embedding_dim < (contract.num_classes or 2):
            raise CannotDecide("LossContract.embedding_dim is below num_classes: classes cannot be at right angles")
        right = torch.eye(contract.embedding_dim, dtype=torch.float64)[inputs.target]
        yield "the right clusters", Inputs((right,), inputs.target)
        yield "clusters across classes", Inputs((right.roll(1, 0),), inputs.target)
        return
    if contract.embedding_dim < rows:
        raise CannotDecide("LossContract.embedding_dim is below the number of rows: pairs cannot be at right angles")
    base = torch.eye(contract.embedding_dim, dtype=torch.float64)[:rows]
    other = base.roll(1, 0)
    views = views_of(contract)
    yield "matching rows", Inputs((base, base, *[other] * (views - 2)), None)
    yield "rows of another pair", Inputs((base, other, *[base] * (views - 2)), None)


def _has_a_frame(loss: Loss, inputs: Inputs) -> bool:
    """Whether turning all embeddings together changes the value."""
    size = loss.contract.embedding_dim
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    start, turned = _cost(loss, inputs), _cost(loss, Inputs((inputs.outputs[0] @ turn,), inputs.target))
    return not same(start, turned, 1.0 + abs(start))


def _values(loss: Loss, inputs: Inputs) -> Seen | None:
    """On which scale outputs lie is not known; that moving away from the target both ways lowers a loss is wrong on
    each."""
    contract = loss.contract
    meant = inputs.outputs[-1] if contract.target == "pair" else inputs.target
    if contract.target == "binary" or meant is None or views_of(contract) > 2:
        raise CannotDecide("what a right answer is, is not known of values with a label")
    if contract.num_outputs is not None:
        return _crossed(loss, inputs)
    if contract.target == "value" and not contract.shape and len(meant) > 1:
        crossed = _crossed(loss, inputs)
        if crossed is not None:
            return crossed
    if contract.output_range != (-math.inf, math.inf):
        raise CannotDecide("LossContract.output_range holds the outputs, so they cannot be moved far from the target")
    rest = inputs.outputs[1:]
    right = _cost(loss, Inputs((meant.clone(), *rest), inputs.target))
    away = [_cost(loss, Inputs((meant + s * by, *rest), inputs.target)) for by in AWAY for s in (1.0, -1.0)]
    if not all(cost < right and not same(cost, right, 1.0 + abs(right)) for cost in away):
        return None
    return Seen(
        cause="reversed",
        summary="moving the output away from the target lowers the loss, in both directions",
        measured=f"{right:.6g} at the target; {', '.join(f'{c:.4g}' for c in away)} at +-1, +-10 and +-100 from it",
        shown_by="the loss is lower at all six distances",
    )


def _crossed(loss: Loss, inputs: Inputs) -> Seen | None:
    """Whether every output of (rows, 1) meets every target of (rows,)."""
    output, target = inputs.outputs[0], inputs.target
    if (loss.contract.num_outputs or 1) != 1 or target is None or len(output) < 2 or loss.contract.shape:
        raise CannotDecide("what a right answer is, is not known of several outputs for one target")
    pairs = [_cost(loss, Inputs((output[i : i + 1],), target[j : j + 1])) for i in range(len(output)) for j in range(len(target))]  # fmt: skip # noqa: E501
    together, own = _cost(loss, inputs), sum(pairs[:: len(output) + 1]) / len(output)
    crossed = sum(pairs) / len(pairs)
    size = 1.0 + sum(map(abs, pairs))
    if not any(same(together, k * crossed, size) for k in (1, len(pairs))) or same(crossed, own, size):
        return None
    return Seen(
        cause="rows_not_matched",
        summary=f"every output meets every target: {tuple(output.shape)} against {tuple(target.shape)} broadcasts",
        measured=f"{together:.6g}, the mean over all {len(pairs)} pairs; each with its own target gives {own:.6g}",
        shown_by="the value is exactly the mean of the losses of all pairs of an output and a target",
    )
