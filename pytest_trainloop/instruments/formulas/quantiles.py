"""Quantile losses written by hand: the pinball loss, and that of all pairs of quantiles (QR-DQN)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pytest_trainloop.instruments.formulas.form import (
    Argument,
    Coefficients,
    Form,
    Mistake,
    Reading,
    Variant,
    one_part,
    same,
)
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CLAMPS,
    DISTANCE_LOSSES,
    MASKING,
    MULTIPLICATIONS,
    ORDER_COMPARISONS,
    SUBTRACTIONS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pytest_trainloop.instruments.formulas.cut import Cut

_SIDES = (
    MASKING | CLAMPS | ORDER_COMPARISONS | frozenset({"maximum", "max", "minimum", "min", "relu", "abs", "__abs__"})
)
"""What tells an error above 0 from one below."""


def _pinball(prediction: torch.Tensor, target: torch.Tensor) -> Mapping[str, torch.Tensor] | None:
    if prediction.shape != target.shape:
        return None
    difference = target - prediction
    return {"above": difference.relu(), "below": (-difference).relu()}


def _read_pinball(found: Coefficients) -> Reading | None:
    """Both sides cost something. Where one costs and the other pays, the loss falls without bound; where both count
    equally, it is the difference itself."""
    above, below = found["above"], found["below"]
    if not above or not below or same(above, -below):
        return None
    if above * below > 0:
        return Reading(1 if above > 0 else -1)
    return Reading(0, _ONE_SIDE_PAYS, {"above": above, "below": below})


_ONE_SIDE_PAYS = Mistake(
    "term_sign",
    "an error of 1 costs {above:g} where the target is above the prediction, and {below:g} where it is below: one side "
    "pays, and the loss falls without bound",
    "loss = torch.maximum(q * (target - prediction), (q - 1) * (target - prediction)).mean()",
)

PINBALL = Form(
    "the pinball loss of a quantile",
    "https://doi.org/10.2307/1913643",
    (Argument("prediction", learned=True), Argument("target", learned=False)),
    (
        Variant(
            _pinball,
            _read_pinball,
            aim=Aim("the distance between prediction and target", lambda p, t: (p - t).abs(), best=0.0, endless=True),
        ),
    ),
    ops=MASKING | MULTIPLICATIONS | ADDITIONS | SUBTRACTIONS | frozenset({"maximum", "max", "minimum", "min", "mean"}),
    needs=(SUBTRACTIONS, _SIDES),
    suits=lambda cut: cut.recorded[0].shape == cut.recorded[1].shape and bool(cut.slice.from_batch(cut.arguments[1])),
    judges_direction=False,
)


def _pairs(
    prediction: torch.Tensor, target: torch.Tensor, share: torch.Tensor, *, kappa: float, of_target: bool = False
) -> torch.Tensor | None:
    """The errors of all pairs, weighted by the share of the predicted quantile; ``of_target``: of the target's."""
    count = share.numel()
    if prediction.numel() != target.numel() or prediction.numel() % count:
        return None
    errors = target.reshape(-1, 1, count) - prediction.reshape(-1, count, 1)
    size = errors.abs()
    cost = size if not kappa else ((size > kappa) * kappa * (size - kappa / 2) + (size <= kappa) * errors**2 / 2)
    shares = share.flatten()[None, None, :] if of_target else share.flatten()[None, :, None]
    return (shares - (errors.detach() < 0).to(errors.dtype)).abs() * cost


def _a_share_each(cut: Cut) -> bool:
    """Whether shares lie between 0 and 1 and differ."""
    prediction, target, share = cut.recorded
    count = share.numel()
    distinct = len(set(share.flatten().tolist())) == count > 1
    ends = all(count in (t.squeeze().shape[-1:] or (0,)) and t.numel() > count for t in (prediction, target))
    return ends and prediction.numel() == target.numel() and distinct and bool(((share > 0) & (share < 1)).all())


_AXIS_OF_TARGET = Mistake(
    "wrong_axes",
    "the shares run along the targets' quantiles and not along the predicted ones: every predicted quantile is trained "
    "to the same value",
    "tau[None, :, None] for errors of shape (rows, predicted, target)",
    shifted=True,
)

PAIRS = Form(
    "the quantile loss of all pairs (QR-DQN)",
    "https://arxiv.org/abs/1710.10044",
    (
        Argument("prediction", learned=True),
        Argument("target", learned=False),
        Argument("share", "positive", learned=False),
    ),
    (
        one_part(_pairs),
        one_part(
            functools.partial(_pairs, of_target=True),
            _AXIS_OF_TARGET,
            aim=Aim("the quantile loss with the shares along the predictions", _pairs),
        ),
    ),
    ops=MULTIPLICATIONS | frozenset({"mean", "sum"}),
    needs=(SUBTRACTIONS | DISTANCE_LOSSES, frozenset({"abs", "__abs__"}), MULTIPLICATIONS),
    numbers={"kappa": (1.0, 0.0)},
    among=lambda name, number: 0 < number <= 10,
    suits=_a_share_each,
    judges_direction=False,
)

FORMS = (PAIRS, PINBALL)
