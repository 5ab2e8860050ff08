"""Binary cross entropy, cross entropy and hinge losses."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pytest_trainloop.instruments.formulas.form import Argument, Coefficients, Form, Mistake, Reading, Variant, one_part
from pytest_trainloop.instruments.formulas.origins import origin
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay
from pytest_trainloop.recording.torch_names import BINARY_LOSSES, CLASS_LOSSES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.instruments.formulas.cut import Cut

LOGS = (
    BINARY_LOSSES
    | CLASS_LOSSES
    | frozenset({"log", "log1p", "log2", "log10", "logsigmoid", "log_sigmoid", "softplus", "log_softmax", "logsumexp"})
)
_CLAMPED = frozenset({"relu", "clamp", "clamp_min", "maximum", "max", "where"})

PROBABILITIES = Argument("prediction", "probabilities", learned=True)
LABELS = Argument("target", "labels", learned=False)
SCORES = Argument("prediction", "scores", learned=True)
CLASSES = Argument("target", "classes", learned=False)


def _small(_name: str, number: float) -> bool:
    return 0 < number <= 1e-2


Logs = tuple[torch.Tensor, torch.Tensor]


def log_p(p: torch.Tensor, eps: float = 0.0) -> Logs:
    return torch.log(p + eps), torch.log(1 - p + eps)


def log_sigmoid(z: torch.Tensor) -> Logs:
    return F.logsigmoid(z), F.logsigmoid(-z)


# Binary cross entropy


def _both_terms(logs: Logs, t: torch.Tensor) -> Mapping[str, torch.Tensor] | None:
    if logs[0].shape != t.shape:
        return None
    return {"positive": t * logs[0], "negative": (1 - t) * logs[1]}


NEGATIVES_MISSING = Mistake(
    "term_missing",
    "entries whose target is 0 cost nothing, so all outputs may rise without end",
    "loss = -(t * log(p) + (1 - t) * log(1 - p)).mean()",
)
TERMS_OPPOSED = Mistake(
    "term_sign",
    "the terms of targets 1 and of targets 0 have opposite signs: one is minimised, the other maximised",
    "put + between the two terms: -(t * log(p) + (1 - t) * log(1 - p)).mean()",
)


def _read_binary(found: Coefficients) -> Reading | None:
    one, other = found["positive"], found["negative"]
    if one * other > 0:
        return Reading(1 if one < 0 else -1)
    if one * other < 0:
        return Reading(0, TERMS_OPPOSED)
    return Reading(1, NEGATIVES_MISSING) if one < 0 else None


def by_label(cost: torch.Tensor, t: torch.Tensor) -> torch.Tensor | None:
    """Means over the entries with the target 1, and over those with 0."""
    return torch.stack([cost[t > 0.5].mean(), cost[t <= 0.5].mean()]) if cost.shape == t.shape else None


def binary_entropy(logs: Logs, t: torch.Tensor) -> torch.Tensor | None:
    if logs[0].shape != t.shape:
        return None
    t = t.to(logs[0].dtype)
    return by_label(-(t * logs[0] + (1 - t) * logs[1]), t)


def _far(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor | None:
    return (p - t.to(p.dtype)).abs().mean() if p.shape == t.shape else None


ENTROPY = "the cross entropy of one label's entries"
DISTANCE = "the distance between probabilities and targets"
TO_LABELS = Aim(DISTANCE, lambda p, t, **_: _far(p, t), best=0.0)
SCORES_TO_LABELS = Aim(DISTANCE, lambda z, t, **_: _far(z.sigmoid(), t), best=0.0)


def _each_by_itself(cut: Cut) -> bool:
    """Whether the probabilities are no shares of one whole, and the targets 0 and 1."""
    target = cut.recorded[1]
    return not by_softmax(cut) and bool((target == 0).any()) and bool((target == 1).any())


BINARY_BY_PROBABILITIES = Form(
    "binary cross entropy",
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.BCELoss.html",
    (PROBABILITIES, LABELS),
    (
        Variant(
            lambda p, t, eps: _both_terms(log_p(p, eps), t),
            _read_binary,
            aim=Aim(ENTROPY, lambda p, t, eps: binary_entropy(log_p(p.clamp(1e-12, 1 - 1e-12)), t), groups=True),
        ),
    ),
    needs=(frozenset({"log", "log1p", "log2", "log10"}),),
    numbers={"eps": (0.0,)},
    among=_small,
    suits=_each_by_itself,
    aim=TO_LABELS,
)
BINARY_BY_SCORES = Form(
    "binary cross entropy of scores",
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html",
    (SCORES, LABELS),
    (
        Variant(
            lambda z, t: _both_terms(log_sigmoid(z), t),
            _read_binary,
            aim=Aim(ENTROPY, lambda z, t: binary_entropy(log_sigmoid(z), t), groups=True),
        ),
    ),
    needs=(LOGS,),
    aim=SCORES_TO_LABELS,
    suits=lambda cut: bool((cut.recorded[1] == 0).any()) and bool((cut.recorded[1] == 1).any()),
)


# Cross entropy over classes


def _over(log: torch.Tensor, t: torch.Tensor, *, dim: int) -> torch.Tensor | None:
    if log.shape != t.shape or log.dim() <= dim % max(log.dim(), 1) or log.dim() < 2:
        return None
    return -(t * log).sum(dim)


def _picked(log: torch.Tensor, y: torch.Tensor, *, dim: int) -> torch.Tensor | None:
    """Minus the entry of each row's class."""
    if log.dim() < 2 or int(y.min()) < 0:
        return None
    log = log.movedim(dim, -1)
    if log.shape[:-1] != y.shape:
        if log.shape[:-1].numel() != y.numel():
            return None
        y = y.reshape(log.shape[:-1])
    return -log.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)


def entropy_of_scores(z: torch.Tensor, t: torch.Tensor, *, dim: int) -> torch.Tensor | None:
    pick = _over if t.is_floating_point() else _picked
    return pick(z.log_softmax(dim), t, dim=dim) if z.dim() >= 2 else None


def _entropy_of(p: torch.Tensor, t: torch.Tensor, *, dim: int, eps: float) -> torch.Tensor | None:
    pick = _over if t.is_floating_point() else _picked
    return pick(torch.log(p + eps), t, dim=dim)


def by_softmax(cut: Cut) -> bool:
    _, made = origin(cut.slice, cut.arguments[0])
    return made is not None and made.name == "softmax"


AXES = (1, -1)


def _missed(p: torch.Tensor, t: torch.Tensor, **_: float) -> torch.Tensor | None:
    """What is missing to 1 at the true class, along the first axis that fits."""
    for dim in AXES:
        true = (_over if t.is_floating_point() else _picked)(p, t, dim=dim)
        if true is not None:
            return 1 + true.mean()
    return None


def _missed_by_scores(z: torch.Tensor, t: torch.Tensor, **_: float) -> torch.Tensor | None:
    return _missed(z.softmax(1 if z.dim() > 1 else 0), t)


TO_CLASSES = Aim("what the true class lacks of the probability 1", _missed, best=0.0)
SCORES_TO_CLASSES = Aim("what the true class lacks of the probability 1", _missed_by_scores, best=0.0)

CROSS_ENTROPY = tuple(
    Form(
        "cross entropy",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
        (SCORES, target),
        tuple(one_part(functools.partial(entropy_of_scores, dim=dim)) for dim in AXES),
        needs=(LOGS,),
        suits=lambda cut: not by_softmax(cut),
        aim=SCORES_TO_CLASSES,
    )
    for target in (LABELS, CLASSES)
)
CROSS_ENTROPY_OF = tuple(
    Form(
        "cross entropy of probabilities",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.NLLLoss.html",
        (PROBABILITIES, target),
        tuple(one_part(functools.partial(_entropy_of, dim=dim)) for dim in AXES),
        needs=(frozenset({"log", "log2", "log10"}),),
        numbers={"eps": (0.0,)},
        among=_small,
        suits=by_softmax,
        aim=TO_CLASSES,
    )
    for target in (LABELS, CLASSES)
)


# Hinge losses

MARGIN_SIGN = Mistake(
    "term_sign",
    "the margin is lowered for rows that are wrong: right scores cost most",
    "relu(margin - y * score)",
)
CLASSES_TURNED = Mistake(
    "term_sign",
    "the score of the true class is pushed below those of the others",
    "relu(margin + scores - score_of_the_true_class)",
)


LEAST_MARGIN = 1e-3
"""Smaller numbers in a clamp keep a logarithm or a root from 0, and are no margins."""


def _hinge(s: torch.Tensor, y: torch.Tensor, *, margin: float, sign: int, power: int) -> torch.Tensor | None:
    return F.relu(margin + sign * y * s) ** power if s.shape == y.shape else None


def _cuts(sign: int, cut: Cut, numbers: Mapping[str, float]) -> bool:
    """Whether the clamp cuts some entries, and not all: else it is a sum, not a hinge. Scores have both signs in the
    run: what has not is a distance, or a probability, kept above 0."""
    if not bool((cut.given.at(0)[0] < 0).any()):
        return False
    margins = [numbers["margin"] + sign * s * y for s, y in map(cut.given.at, (0, 1, 2, 3))]
    return any(bool((m < 0).any()) for m in margins) and any(bool((m > 0).any()) for m in margins)


def _grows(cut: Cut) -> bool:
    """Whether the value goes on growing on one side: scores that are clamped themselves, and multiplied, do not."""
    scores, target = (t.detach() for t in cut.given.at(1))
    far = ({cut.arguments[0]: scores * k, cut.arguments[1]: target} for k in (1e3, 2e3))
    try:
        (one,), (two,) = (cut.slice.replay(given, [cut.number]) for given in far)
    except CannotReplay:
        return False
    return bool((one != two).any())


HINGE = Form(
    "hinge loss",
    "https://en.wikipedia.org/wiki/Hinge_loss",
    (Argument("prediction", "values", learned=True), Argument("target", "signs", learned=False)),
    tuple(
        one_part(
            functools.partial(_hinge, sign=sign, power=power),
            mistake,
            aim=Aim("the hinge loss", functools.partial(_hinge, sign=-1, power=power)),
            suits=_grows,
            holds=functools.partial(_cuts, sign),
        )
        for sign, mistake in ((-1, None), (1, MARGIN_SIGN))
        for power in (1, 2)
    ),
    needs=(_CLAMPED, frozenset({"mul", "rmul", "__mul__"})),
    aim=Aim(
        "the hinge loss of rows of one label",
        lambda s, y, margin: by_label(F.relu(margin - (2 * y - 1) * s), y),
        groups=True,
    ),
    numbers={"margin": (1.0,)},
    among=lambda name, number: LEAST_MARGIN <= number <= 100,
)


def _hinge_classes(
    z: torch.Tensor, y: torch.Tensor, *, margin: float, sign: int, power: int, whole: bool
) -> torch.Tensor | None:
    if z.dim() != 2 or y.numel() != len(z) or int(y.min()) < 0:
        return None
    index = y.long().reshape(-1, 1)
    costs = F.relu(margin + sign * (z - z.gather(1, index))) ** power
    return costs if whole else costs.scatter(1, index, 0.0).sum(1)


HINGE_CLASSES = Form(
    "hinge loss over classes",
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiMarginLoss.html",
    (Argument("prediction", "values", learned=True), CLASSES),
    tuple(
        one_part(
            functools.partial(_hinge_classes, sign=sign, power=power, whole=whole),
            mistake,
            aim=Aim("the hinge loss", functools.partial(_hinge_classes, sign=1, power=power, whole=whole)),
        )
        for sign, mistake in ((1, None), (-1, CLASSES_TURNED))
        for power in (1, 2)
        for whole in (False, True)
    ),
    needs=(_CLAMPED,),
    numbers={"margin": (1.0,)},
    among=lambda name, number: LEAST_MARGIN <= number <= 100,
)

FORMS = (
    BINARY_BY_PROBABILITIES,
    BINARY_BY_SCORES,
    *CROSS_ENTROPY,
    *CROSS_ENTROPY_OF,
    HINGE,
    HINGE_CLASSES,
)
