"""Likelihoods and divergences written by hand: Gaussian, Laplace, Poisson, the divergence of a Gaussian from the
standard normal."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.formulas.form import Argument, Coefficients, Form, Mistake, Reading, Variant, same
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import ADDITIONS, MULTIPLICATIONS, SUBTRACTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_trainloop.instruments.formulas.cut import Cut

_EXPONENTIALS = frozenset({"exp", "log", "expm1", "log1p", "logsumexp", "exp2", "log2"})
"""One of them lies between a spread and its likelihood, however the spread is given."""

_DISTANCES = frozenset({"abs", "__abs__", "l1_loss", "absolute"})

LIKELIHOOD = "the negative log-likelihood of the targets"


def _right(
    basis: Callable[..., Mapping[str, torch.Tensor] | None], **weights: float
) -> Callable[..., torch.Tensor | None]:
    """The textbook's sum of the parts of a form."""

    def made(*arguments: torch.Tensor, **numbers: float) -> torch.Tensor | None:
        parts = basis(*arguments, **numbers)
        return None if parts is None else torch.stack([w * parts[name] for name, w in weights.items()]).sum(0)

    return made


_SUMS = ADDITIONS | SUBTRACTIONS
"""What gives the value: the logarithm and the rest are two summands."""


def _logarithm(spread: torch.Tensor, *others: torch.Tensor, logs: bool) -> torch.Tensor | None:
    """That of a spread, which is given by it (``logs``) or is above 0; None where shapes differ."""
    if any(other.shape != spread.shape for other in others) or not (logs or bool((spread > 0).all())):
        return None
    return spread if logs else spread.log()


def _gaussian(
    mean: torch.Tensor, spread: torch.Tensor, target: torch.Tensor, *, logs: bool, times: float
) -> Mapping[str, torch.Tensor] | None:
    """The logarithm of the spread, which is ``times`` in that of the variance, and the squares over the variance."""
    if (logarithm := _logarithm(spread, mean, target, logs=logs)) is None:
        return None
    return {"logarithm": logarithm, "squares": (mean - target).square() * (-times * logarithm).exp()}


def _read_gaussian(found: Coefficients, *, times: float) -> Reading | None:
    """The logarithm of the variance counts as often as the squares over it."""
    logarithm, squares = found["logarithm"] / times, found["squares"]
    return _read_ratio(squares, logarithm) if logarithm and squares else None


def _laplace(
    mean: torch.Tensor, spread: torch.Tensor, target: torch.Tensor, *, logs: bool
) -> Mapping[str, torch.Tensor] | None:
    if (logarithm := _logarithm(spread, mean, target, logs=logs)) is None:
        return None
    return {"logarithm": logarithm, "distances": (mean - target).abs() * (-logarithm).exp()}


def _read_laplace(found: Coefficients) -> Reading | None:
    distances, logarithm = found["distances"], found["logarithm"]
    return _read_ratio(distances, logarithm, halves=False) if distances and logarithm else None


def _read_ratio(errors: float, logarithm: float, *, halves: bool = True) -> Reading | None:
    direction, ratio = 1 if errors > 0 else -1, logarithm / errors
    if same(ratio, 1.0):
        return Reading(direction)
    if same(ratio, -1.0):
        return Reading(direction, _SIGN_OF_LOGARITHM)
    if halves and (same(ratio, 0.5) or same(ratio, 2.0)):
        return Reading(direction, _FACTOR, {"ratio": ratio})
    return None


_SIGN_OF_LOGARITHM = Mistake(
    "term_sign",
    "the logarithm of the spread is taken away where it is to be added: a smaller error and a larger spread both "
    "lower the loss without bound",
    "nll = 0.5 * (log_var + (target - mean) ** 2 / log_var.exp())",
)
_FACTOR = Mistake(
    "factor_missing",
    "the log variance counts {ratio:g} times as much as it should against the squares: the variance that is "
    "learned is the right one divided by {ratio:g}",
    "nll = 0.5 * (log_var + (target - mean) ** 2 / log_var.exp()); with a deviation: std.log() + 0.5 * ((target - mean)"
    " / std) ** 2",
    shifted=True,
)


def _own_spread(cut: Cut) -> bool:
    """Whether the shapes are equal, and each entry of a row has a spread of its own: one that several share counts as
    often as it is shared."""
    mean, spread, target = cut.recorded
    if not mean.shape == spread.shape == target.shape:
        return False
    return spread.dim() < 2 or all(
        spread.shape[axis] == 1 or not bool((spread == spread.select(axis, 0).unsqueeze(axis)).all())
        for axis in range(1, spread.dim())
    )


_GIVEN = (
    Argument("mean", learned=True),
    Argument("spread", learned=True),
    Argument("target", learned=False),
)

GAUSSIAN = Form(
    "the negative log-likelihood of a normal density",
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.GaussianNLLLoss.html",
    _GIVEN,
    tuple(
        Variant(
            way := functools.partial(_gaussian, logs=logs, times=times),
            functools.partial(_read_gaussian, times=times),
            aim=Aim(LIKELIHOOD, _right(way, logarithm=0.5 * times, squares=0.5), shared=True),
        )
        for logs in (True, False)
        for times in (1.0, 2.0, -1.0)
    ),
    ops=_SUMS,
    needs=(_EXPONENTIALS,),
    suits=_own_spread,
)

LAPLACE = Form(
    "the negative log-likelihood of a Laplace density",
    "https://docs.pytorch.org/docs/stable/distributions.html#laplace",
    _GIVEN,
    tuple(
        Variant(
            way := functools.partial(_laplace, logs=logs),
            _read_laplace,
            aim=Aim(LIKELIHOOD, _right(way, logarithm=1.0, distances=1.0), shared=True),
        )
        for logs in (True, False)
    ),
    ops=_SUMS,
    needs=(_EXPONENTIALS, _DISTANCES),
    suits=_own_spread,
)


def _poisson(rate: torch.Tensor, target: torch.Tensor, *, logs: bool, eps: float) -> Mapping[str, torch.Tensor] | None:
    if rate.shape != target.shape:
        return None
    target = target.double()
    logarithm, mean = (rate, rate.exp()) if logs else ((rate + eps).log(), rate)
    return {"rate": mean, "product": target * logarithm, "of counts": torch.lgamma(target + 1)}


def _read_poisson(found: Coefficients) -> Reading | None:
    rate, product = found["rate"], found["product"]
    if not rate or not product:
        return None
    direction = 1 if rate > 0 else -1
    if same(product, -rate):
        return Reading(direction)
    return Reading(direction, _SIGN_OF_COUNTS) if same(product, rate) else None


_SIGN_OF_COUNTS = Mistake(
    "term_sign",
    "the counts times the logarithm of the rate are added where they are to be taken away: every rate is driven to 0",
    "loss = (log_rate.exp() - target * log_rate).mean()",
)


def _counts(cut: Cut) -> bool:
    """Whether the target holds whole numbers from 0 on, more than two of them."""
    rate, target = cut.recorded
    target = target.double()
    return (
        rate.shape == target.shape
        and bool((target >= 0).all())
        and bool((target == target.round()).all())
        and len(set(target.flatten().tolist())) > 2
    )


POISSON = Form(
    "the negative log-likelihood of Poisson counts",
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.PoissonNLLLoss.html",
    (Argument("rate", learned=True), Argument("target", learned=False)),
    tuple(
        Variant(
            way := functools.partial(_poisson, logs=logs, eps=eps),
            _read_poisson,
            aim=Aim(LIKELIHOOD, _right(way, rate=1.0, product=-1.0)),
        )
        for logs, eps in ((True, 0.0), (False, 0.0), (False, 1e-8))
    ),
    ops=_SUMS,
    needs=(_EXPONENTIALS, MULTIPLICATIONS),
    suits=_counts,
)


def _divergence(
    mean: torch.Tensor, spread: torch.Tensor, *, logs: bool, times: float, power: int = 2
) -> Mapping[str, torch.Tensor] | None:
    """The logarithm of the spread, a power of the mean, and the spread by one of the ways to give it."""
    if (logarithm := _logarithm(spread, mean, logs=logs)) is None:
        return None
    return {"logarithm": logarithm, "mean": mean**power, "variance": (times * logarithm).exp()}


def _read_divergence(found: Coefficients, *, times: float) -> Reading | None:
    """The square of the mean and the variance have equal factors, the logarithm of the variance the negative one; over
    the prior's variance, where the constant is not that of the standard normal."""
    mean, variance, constant, logarithm = found["mean"], found["variance"], found["1"], found["logarithm"] / times
    if not mean or not variance or not logarithm:
        return None
    direction = 1 if mean > 0 else -1
    if same(abs(mean), abs(variance)) and same(abs(logarithm), abs(mean)):
        turned = not same(mean, variance) or not same(logarithm, -mean)
        return Reading(direction, _SIGN_IN_DIVERGENCE if turned else None)
    if not same(mean, variance):
        return None
    # no prior has this constant: that of a variance of 2 has 0.61 times the one of the mean, that of 1/2 has 0.85 times
    known = same(constant, logarithm) or same(constant, -mean)
    if known and (same(logarithm, -2 * mean) or same(logarithm, -0.5 * mean)):
        return Reading(direction, _FACTOR_IN_DIVERGENCE, {"best": -logarithm / mean})
    return Reading(direction)


def _read_slip(found: Coefficients, *, mistake: Mistake) -> Reading | None:
    """A divergence but for one slip, its constant included."""
    variance = found["variance"]
    whole = same(found["mean"], variance) and same(found["logarithm"], -variance) and same(found["1"], -variance)
    return Reading(1 if variance > 0 else -1, mistake) if variance and whole else None


_DIVERGENCE = "kl = -0.5 * (1 + log_var - mean ** 2 - log_var.exp()).sum(1).mean()"
_SIGN_IN_DIVERGENCE = Mistake(
    "term_sign",
    "one of its terms has the other sign: it is not least at a mean of 0 and a variance of 1",
    _DIVERGENCE,
)
_FACTOR_IN_DIVERGENCE = Mistake(
    "factor_missing",
    "the logarithm counts in another ratio than it must to the square of the mean and the variance, though the "
    "constant is that of the standard normal: it is least at a variance of {best:g}, not 1",
    "kl = 0.5 * (mean ** 2 + std ** 2 - 1) - std.log(); by log_std the variance is exp(2 * log_std)",
    shifted=True,
)
_MEAN_NOT_SQUARED = Mistake("power_differs", "the mean is not squared: it is driven to minus infinity", _DIVERGENCE)
_DEVIATION = Mistake(
    "parameter_confused",
    "the deviation, exp(0.5 * log_var), is used in place of the variance",
    _DIVERGENCE,
    shifted=True,
)


def _to_the_prior(*, logs: bool, times: float) -> Aim:
    """The divergence itself."""
    parts = _right(
        functools.partial(_divergence, logs=logs, times=times), logarithm=-0.5 * times, mean=0.5, variance=0.5
    )
    return Aim(
        "the KL divergence",
        lambda mean, spread: None if (made := parts(mean, spread)) is None else made - 0.5,
        endless=True,
    )


DIVERGENCE = Form(
    "the KL divergence of a normal density from the standard normal",
    "https://arxiv.org/abs/1312.6114",
    (Argument("mean", learned=True), Argument("spread", learned=True)),
    (
        *(
            Variant(
                functools.partial(_divergence, logs=logs, times=times),
                functools.partial(_read_divergence, times=times),
                aim=_to_the_prior(logs=logs, times=times),
            )
            for logs in (True, False)
            for times in (1.0, 2.0)
        ),
        Variant(
            functools.partial(_divergence, logs=True, times=1.0, power=1),
            functools.partial(_read_slip, mistake=_MEAN_NOT_SQUARED),
            _MEAN_NOT_SQUARED,
            aim=_to_the_prior(logs=True, times=1.0),
        ),
        Variant(
            functools.partial(_divergence, logs=True, times=0.5),
            functools.partial(_read_slip, mistake=_DEVIATION),
            _DEVIATION,
            aim=_to_the_prior(logs=True, times=1.0),
        ),
    ),
    ops=_SUMS,
    needs=(_EXPONENTIALS,),
    suits=lambda cut: cut.recorded[0].shape == cut.recorded[1].shape,
    always_judged=True,
)

FORMS = (GAUSSIAN, LAPLACE, POISSON, DIVERGENCE)
