"""Focal losses, of single labels and over classes."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.formulas.classification import (
    AXES,
    CLASSES,
    ENTROPY,
    LABELS,
    LOGS,
    PROBABILITIES,
    SCORES,
    SCORES_TO_CLASSES,
    SCORES_TO_LABELS,
    TO_LABELS,
    Logs,
    binary_entropy,
    by_softmax,
    entropy_of_scores,
    log_p,
    log_sigmoid,
)
from pytest_trainloop.instruments.formulas.form import Coefficients, Form, Mistake, Reading, Variant, one_part
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import MULTIPLICATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.instruments.formulas.cut import Cut

_POWERS = frozenset({"pow", "__pow__", "square", "mul"})


def _exponent(_name: str, number: float) -> bool:
    return 0.25 <= number <= 8


EASY_FOR_HARD = Mistake(
    "turned_round",
    "rows are weighted by pt ** gamma: those that are right already weigh most",
    "where the weight is made: (1 - pt) ** gamma, with pt the probability of the true class",
)
ONE_SIDE_FOR_BOTH = Mistake(
    "ingredient_differs",
    "targets of 0 are weighted by the probability that belongs to targets of 1",
    "pt = torch.where(t == 1, p, 1 - p); weight = (1 - pt) ** gamma",
)
MEAN_FIRST = Mistake(
    "mean_taken_early",
    "the weight is computed from the mean cross entropy: one number for the whole batch",
    "where the cross entropy is made: reduction='none'; weigh each row by (1 - pt) ** gamma, then take the mean",
    otherwise="advice",
)
GROWING = Mistake(
    "term_sign",
    "pt is exp(loss), which is above 1, for exp(-loss)",
    "pt = torch.exp(-loss)",
    otherwise="advice",
)


EXPONENT_AS_FACTOR = Mistake(
    "power_differs",
    "one side is weighted by a power gamma, the other is multiplied by gamma",
    "weight = (1 - p) ** gamma for targets of 1, p ** gamma for targets of 0",
    shown_by="the form agrees with the exponent 1 on one side, whose weight is multiplied by the exponent of the other",
    level="advice",
)


def _focal(
    logs: Logs, t: torch.Tensor, *, gamma: float, positive: int, negative: int, factor: int | None = None
) -> Mapping[str, torch.Tensor] | None:
    """Both terms with their weights: powers of 1 - p (``positive`` = 1 for targets of 1) or p (0). ``factor``: the
    side whose exponent is 1."""
    if logs[0].shape != t.shape:
        return None
    powers = [logs[side].exp() ** (1 if side == factor else gamma) for side in (0, 1)]
    return {"positive": t * powers[positive] * logs[0], "negative": (1 - t) * powers[negative] * logs[1]}


def _multiplied(side: int, cut: Cut, numbers: Mapping[str, float]) -> bool:
    """Whether the weight of this side is multiplied by the exponent of the other, and by nothing else first."""
    gamma = numbers["gamma"]
    if gamma == 1:
        return False
    p = cut.recorded[0]
    p = p.sigmoid() if float(p.min()) < 0 or float(p.max()) > 1 else p
    weight = 1 - p if side else p
    for call in (cut.slice.calls[c] for c in cut.between):
        if call.name in MULTIPLICATIONS and call.numbers == (gamma,) and len(call.inputs) == 1:
            given = cut.slice.values[call.inputs[0]].tensor
            if given.shape == weight.shape and torch.allclose(given, weight, rtol=1e-9, atol=0):
                return True
    return False


def _read_focal(mistake: Mistake | None, found: Coefficients) -> Reading | None:
    one, other = found["positive"], found["negative"]
    return Reading(1 if one < 0 else -1, mistake) if one * other > 0 else None


def _entropies(logs: Logs, t: torch.Tensor) -> torch.Tensor | None:
    return None if logs[0].shape != t.shape else -(t * logs[0] + (1 - t) * logs[1])


def _modulated(loss: torch.Tensor | None, *, gamma: float, how: str) -> torch.Tensor | None:
    """The cross entropy times a power of what its probability pt lacks of 1: with a mistake, of the mean cross entropy,
    of exp(loss) for pt, or of pt itself."""
    if loss is None:
        return None
    loss = loss.mean() if how == "mean" else loss
    pt = torch.exp(loss if how == "grown" else -loss)
    return (pt if how == "easy" else 1 - pt) ** gamma * loss


def _focal_variants(logs: str) -> tuple[Variant, ...]:
    made = log_sigmoid if logs == "scores" else log_p
    ends = (-math.inf, math.inf) if logs == "scores" else (1e-12, 1 - 1e-12)
    aim = Aim(ENTROPY, lambda x, t, gamma: binary_entropy(made(x.clamp(*ends)), t), groups=True)
    of_plain = Aim("the plain cross entropy", lambda x, t, gamma: _entropies(made(x), t), parallel=True)
    wanted: tuple[tuple[int, int, Mistake | None], ...] = (
        (1, 0, None),
        (0, 1, EASY_FOR_HARD),
        (1, 1, ONE_SIDE_FOR_BOTH),
        (0, 0, ONE_SIDE_FOR_BOTH),
    )
    terms = tuple(
        Variant(
            lambda x, t, gamma, a=positive, b=negative: _focal(made(x), t, gamma=gamma, positive=a, negative=b),
            functools.partial(_read_focal, mistake),
            mistake,
            aim=aim,
        )
        for positive, negative, mistake in wanted
    )
    halves = tuple(
        Variant(
            lambda x, t, gamma, side=side: _focal(made(x), t, gamma=gamma, positive=1, negative=0, factor=side),
            functools.partial(_read_focal, EXPONENT_AS_FACTOR),
            EXPONENT_AS_FACTOR,
            holds=functools.partial(_multiplied, side),
        )
        for side in (0, 1)
    )
    return (
        *terms,
        *halves,
        one_part(
            lambda x, t, gamma: _modulated(_entropies(made(x), t), gamma=gamma, how="mean"), MEAN_FIRST, aim=of_plain
        ),
        one_part(lambda x, t, gamma: _modulated(_entropies(made(x), t), gamma=gamma, how="grown"), GROWING, aim=aim),
    )


def _of_one_shape(cut: Cut) -> bool:
    """Whether each entry has its own target, and these are not all equal."""
    scores, target = cut.recorded
    return scores.shape == target.shape and bool((target != target.flatten()[0]).any())


FOCAL_PAGE = "https://arxiv.org/abs/1708.02002"

FOCAL = tuple(
    Form(
        "focal loss",
        FOCAL_PAGE,
        (argument, LABELS),
        _focal_variants(argument.role),
        needs=(LOGS, _POWERS),
        numbers={"gamma": (2.0,)},
        among=_exponent,
        suits=_of_one_shape,
        aim=aim,
    )
    for argument, aim in ((SCORES, SCORES_TO_LABELS), (PROBABILITIES, TO_LABELS))
)


_HOW: tuple[tuple[str, Mistake | None], ...] = (
    ("right", None),
    ("easy", EASY_FOR_HARD),
    ("mean", MEAN_FIRST),
    ("grown", GROWING),
)

FOCAL_CLASSES = tuple(
    Form(
        "focal loss",
        FOCAL_PAGE,
        (SCORES, target),
        tuple(
            one_part(
                lambda z, y, gamma, dim=dim, how=how: _modulated(
                    entropy_of_scores(z, y, dim=dim), gamma=gamma, how=how
                ),
                mistake,
                aim=Aim(
                    "the plain cross entropy",
                    lambda z, y, gamma, dim=dim: entropy_of_scores(z, y, dim=dim),
                    parallel=how == "mean",
                ),
            )
            for dim in AXES
            for how, mistake in _HOW
        ),
        needs=(LOGS, _POWERS),
        numbers={"gamma": (2.0,)},
        among=_exponent,
        suits=lambda cut: not by_softmax(cut),
        aim=SCORES_TO_CLASSES,
    )
    for target in (LABELS, CLASSES)
)

FORMS = (*FOCAL, *FOCAL_CLASSES)
