"""Is the value finite, and its gradient, for calls with one special thing about them?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.losses.alignment import require_aligned
from pytest_trainloop.losses.calls import Answer, Refused
from pytest_trainloop.losses.search import Seen
from pytest_trainloop.strategies.loss_cases import TOLD, Inputs, inputs_of

if TYPE_CHECKING:
    from pytest_trainloop.losses.evidence import Loss
    from pytest_trainloop.strategies.loss_cases import Case

REPRESENTABLE = torch.finfo(torch.float32).max
HALVINGS = 8


def look(loss: Loss, case: Case) -> Seen | None:
    """What is not finite in float32 where the true value can be represented there."""
    inputs = inputs_of(loss.contract, case).to(torch.float32)
    answer = _trained(loss, loss.own(inputs))
    if answer.finite:
        return None
    if case.trait == "some_ignored":
        require_aligned(loss, case)  # what is shifted inside may leave none that count
    double = inputs.to(torch.float64)
    if _grows_past(loss, double):
        return None
    wide = loss.wide(double)
    place, made = _what(answer)
    return Seen(
        cause=case.trait,
        summary=f"{place} is {made} for {TOLD[case.trait]}",
        measured=f"value {answer.total:.4g} in float32, {wide.total:.4g} in float64; "
        f"outputs in [{_low(inputs):.4g}, {_high(inputs):.4g}]",
        shown_by=_shown_by(loss, case),
    )


def _trained(loss: Loss, answer: Answer) -> Answer:
    """The answer with the gradients that a model gets: the second of a pair of scores is a teacher's."""
    teacher = loss.contract.target == "pair" and loss.contract.expects != "embeddings"
    return replace(answer, grads=answer.grads[:1]) if teacher else answer


def _shown_by(loss: Loss, case: Case) -> str:
    """The same rows with nothing special about them."""
    rows = max(case.rows, 4, loss.contract.min_rows)
    plain = replace(case, trait="ordinary", ignored=(), rows=rows)
    try:
        fine = case.trait != "ordinary" and loss.own(inputs_of(loss.contract, plain).to(torch.float32)).finite
    except Refused:
        fine = False
    return "the same call with ordinary values is finite" if fine else "nothing is special about these values"


def _grows_past(loss: Loss, inputs: Inputs) -> bool:
    """Whether the true value, or its gradient, is finite and too large for float32: found at outputs small enough for
    float64."""
    for _ in range(HALVINGS):
        try:
            wide = _trained(loss, loss.wide(inputs))
        except Refused:
            return False
        if wide.finite:
            largest = max([abs(wide.total), *(float(g.abs().max()) for g in wide.grads if g is not None and g.numel())])
            return largest > REPRESENTABLE
        inputs = Inputs(tuple(o / 2 for o in inputs.outputs), inputs.target)
    return False


def _what(answer: Answer) -> tuple[str, str]:
    if not math.isfinite(answer.total):
        return "the value", "NaN" if math.isnan(answer.total) else "infinite"
    grads = [g for g in answer.grads if g is not None]
    return "the gradient", "NaN" if any(bool(g.isnan().any()) for g in grads) else "infinite"


def _low(inputs: Inputs) -> float:
    return min(float(o.min()) for o in inputs.outputs)


def _high(inputs: Inputs) -> float:
    return max(float(o.max()) for o in inputs.outputs)
