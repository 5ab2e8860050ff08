"""Whether the correct answer costs no more than a wrong one.

A correct answer is compared with the same answer for another class: both have the same confidence, the same smoothing
and the same weights, so that only the target separates them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.instruments.losses.alignment import require_aligned
from pytest_trainloop.instruments.losses.calls import same
from pytest_trainloop.instruments.strategies.loss_cases import Case, LossInputs, class_axis, inputs_of, views_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.instruments.losses.evidence import Loss

CONFIDENCE = 0.9
"""The probability that an answer gives its class."""

DISTANCES = (1.0, 10.0, 100.0)
"""Distances of outputs from the target, in both directions."""


def cheaper_wrong_answer(loss: Loss, case: Case) -> Finding | None:
    """A wrong answer that costs less than the correct one, or a target that does not matter."""
    require_aligned(loss, case)
    inputs = inputs_of(loss.contract, case)
    unused = _unused(loss, inputs)
    if unused is not None:
        return unused
    if loss.contract.expects == "values":
        return _values(loss, inputs)
    (_, correct), *wrong = [(name, _cost(loss, answer)) for name, answer in _answers(loss, inputs)]
    costs = [correct, *(cost for _, cost in wrong)]
    if not all(map(math.isfinite, costs)):
        raise CannotDecide("the value is not finite")
    cheapest, lowest = min(wrong, key=lambda named: named[1])
    if lowest >= correct or same(lowest, correct, 1.0 + max(map(abs, costs))):
        return None
    measured = f"the correct answer costs {correct:.6g}, {cheapest} {lowest:.6g}"
    if all(cost < correct for _, cost in wrong):
        return Finding(
            cause="reversed",
            summary="the correct answer costs more than every wrong one",
            measured=measured,
            shown_by=f"{len(wrong)} wrong answers of the same confidence were compared",
        )
    return Finding(
        cause="other_class",
        summary=f"{cheapest} costs less than the correct answer",
        measured=measured,
        shown_by="other wrong answers cost more: the target is taken for another class",
    )


def _cost(loss: Loss, inputs: LossInputs) -> float:
    return loss.float64(inputs, grad=False).total


def _unused(loss: Loss, inputs: LossInputs) -> Finding | None:
    """A value that is the same for every target."""
    target = inputs.target
    if target is None:
        others = [LossInputs((inputs.outputs[0], *other), None) for other in _other_views(loss, inputs)]
    elif loss.contract.expects == "embeddings":
        return None
    else:
        others = [LossInputs(inputs.outputs, other) for other in _other_targets(loss, target)]
    start = _cost(loss, inputs)
    size = 1.0 + abs(start)
    if not math.isfinite(start):
        raise CannotDecide("the value is not finite")
    if not others or not all(same(_cost(loss, other), start, size) for other in others):
        return None
    return Finding(
        cause="target_unused",
        summary="the value does not depend on the target",
        measured=f"{start:.6g} for {len(others) + 1} different targets of one output",
        shown_by=f"only the {'targets were' if target is not None else 'outputs after the first were'} changed",
    )


def _other_views(loss: Loss, inputs: LossInputs) -> Iterator[tuple[torch.Tensor, ...]]:
    """The outputs after the first of two other cases."""
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


def _answers(loss: Loss, inputs: LossInputs) -> Iterator[tuple[str, LossInputs]]:
    """The correct answer, then wrong ones that differ from it in one row."""
    contract = loss.contract
    if contract.expects == "embeddings":
        yield from _embeddings(loss, inputs)
    elif contract.target == "index" and inputs.target is not None:
        for k in range(contract.num_classes or 2):
            answered = inputs.target.clone()
            answered.view(-1)[0] = (answered.view(-1)[0] + k) % (contract.num_classes or 2)
            hot = torch.nn.functional.one_hot(answered, contract.num_classes or 2).movedim(-1, class_axis(contract))
            yield f"class t + {k}", _as_expected(loss, inputs, hot.to(torch.float64))
    elif contract.target == "binary" and inputs.target is not None:
        for k in (0, 1):
            high = inputs.target == max(contract.labels)
            high.view(-1)[0] = high.view(-1)[0] != bool(k)
            yield "the other label", _as_expected(loss, inputs, high.to(torch.float64))
    else:
        yield from _permuted(loss, inputs)


def _as_expected(loss: Loss, inputs: LossInputs, hot: torch.Tensor) -> LossInputs:
    """An answer in the form that the contract expects, with the probability 0.9 where ``hot`` is 1."""
    contract = loss.contract
    if contract.target == "binary":
        probability = 1.0 - CONFIDENCE + (2.0 * CONFIDENCE - 1.0) * hot
        logits = probability.logit()
    else:
        rest = (1.0 - CONFIDENCE) / ((contract.num_classes or 2) - 1)
        probability = rest + (CONFIDENCE - rest) * hot
        logits = probability.log()
    low, high = contract.output_range
    if contract.expects == "logits" and (math.isfinite(low) or math.isfinite(high)):
        low, high = (low, high) if math.isfinite(low) and math.isfinite(high) else (-CONFIDENCE, CONFIDENCE)
        logits = low + (high - low) * (0.1 + 0.8 * hot)
    form = {"probabilities": probability, "log_probabilities": probability.log()}.get(contract.expects, logits)
    return LossInputs((form, *(form for _ in inputs.outputs[1:])), inputs.target)


def _permuted(loss: Loss, inputs: LossInputs) -> Iterator[tuple[str, LossInputs]]:
    """The target as the answer, then with the classes of its first row rotated."""
    axis = class_axis(loss.contract)
    if inputs.target is None:
        correct = inputs.outputs[-1]
    else:
        correct = inputs.target.log() if loss.contract.expects != "probabilities" else inputs.target
    for k in range(correct.shape[axis]):
        answer = correct.clone()
        answer[:1] = correct[:1].roll(k, axis)
        outputs = (answer, *inputs.outputs[1:]) if inputs.target is None else (answer,) * len(inputs.outputs)
        yield f"the target rotated by {k} classes", LossInputs(outputs, inputs.target)


def _embeddings(loss: Loss, inputs: LossInputs) -> Iterator[tuple[str, LossInputs]]:
    contract, rows = loss.contract, inputs.outputs[0].shape[0]
    if contract.target in ("binary", "value"):
        raise CannotDecide("a high label of two embeddings may mean near or far")
    if contract.target == "index" and inputs.target is not None:
        if not _rotation_invariant(loss, inputs):
            raise CannotDecide("the criterion has fixed directions (proxies), so no answer is known to be correct")
        if contract.embedding_dim < (contract.num_classes or 2):
            raise CannotDecide("LossContract.embedding_dim is below num_classes: classes cannot be orthogonal")
        clusters = torch.eye(contract.embedding_dim, dtype=torch.float64)[inputs.target]
        yield "clusters by class", LossInputs((clusters,), inputs.target)
        yield "clusters across classes", LossInputs((clusters.roll(1, 0),), inputs.target)
        return
    if contract.embedding_dim < rows:
        raise CannotDecide("LossContract.embedding_dim is below the number of rows: pairs cannot be orthogonal")
    base = torch.eye(contract.embedding_dim, dtype=torch.float64)[:rows]
    other = base.roll(1, 0)
    views = views_of(contract)
    yield "matching rows", LossInputs((base, base, *[other] * (views - 2)), None)
    yield "rows of another pair", LossInputs((base, other, *[base] * (views - 2)), None)


def _rotation_invariant(loss: Loss, inputs: LossInputs) -> bool:
    """Whether a rotation of all embeddings leaves the value unchanged."""
    size = loss.contract.embedding_dim
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    start, rotated = _cost(loss, inputs), _cost(loss, LossInputs((inputs.outputs[0] @ rotation,), inputs.target))
    return same(start, rotated, 1.0 + abs(start))


def _values(loss: Loss, inputs: LossInputs) -> Finding | None:
    """The scale of outputs is not known; a loss that falls in both directions away from the target is wrong on every
    scale."""
    contract = loss.contract
    correct = inputs.outputs[-1] if contract.target == "pair" else inputs.target
    if contract.target == "binary" or correct is None or views_of(contract) > 2:
        raise CannotDecide("the correct answer to values with a label is not known")
    if contract.num_outputs is not None:
        return _rows_not_matched(loss, inputs)
    if contract.target == "value" and not contract.shape and len(correct) > 1:
        not_matched = _rows_not_matched(loss, inputs)
        if not_matched is not None:
            return not_matched
    if contract.output_range != (-math.inf, math.inf):
        raise CannotDecide("LossContract.output_range bounds the outputs, so they cannot be far from the target")
    rest = inputs.outputs[1:]
    lowest = _cost(loss, LossInputs((correct.clone(), *rest), inputs.target))
    away = [_cost(loss, LossInputs((correct + s * by, *rest), inputs.target)) for by in DISTANCES for s in (1.0, -1.0)]
    if not all(cost < lowest and not same(cost, lowest, 1.0 + abs(lowest)) for cost in away):
        return None
    return Finding(
        cause="reversed",
        summary="the loss falls as the output moves away from the target, in both directions",
        measured=f"{lowest:.6g} at the target; {', '.join(f'{c:.4g}' for c in away)} at +-1, +-10 and +-100 from it",
        shown_by="the loss is lower at all six distances",
    )


def _rows_not_matched(loss: Loss, inputs: LossInputs) -> Finding | None:
    """Every output of (rows, 1) compared with every target of (rows,)."""
    output, target = inputs.outputs[0], inputs.target
    if (loss.contract.num_outputs or 1) != 1 or target is None or len(output) < 2 or loss.contract.shape:
        raise CannotDecide("the correct answer of several outputs for one target is not known")
    pairs = [
        _cost(loss, LossInputs((output[i : i + 1],), target[j : j + 1]))
        for i in range(len(output))
        for j in range(len(target))
    ]
    value, matched, all_pairs = (
        _cost(loss, inputs),
        sum(pairs[:: len(output) + 1]) / len(output),
        sum(pairs) / len(pairs),
    )
    size = 1.0 + sum(map(abs, pairs))
    if not any(same(value, k * all_pairs, size) for k in (1, len(pairs))) or same(all_pairs, matched, size):
        return None
    return Finding(
        cause="rows_not_matched",
        summary=f"every output is compared with every target: {tuple(output.shape)}, {tuple(target.shape)} broadcast",
        measured=f"{value:.6g}, the mean over all {len(pairs)} pairs; each with its own target gives {matched:.6g}",
        shown_by="the value is exactly the mean of the losses of all pairs of an output and a target",
    )
