"""Likelihoods of mixtures written by hand."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pytest_trainloop.instruments.formulas.form import Argument, Form, Mistake, one_part
from pytest_trainloop.instruments.formulas.origins import origin
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import ADDITIONS, SUBTRACTIONS

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.instruments.formulas.cut import Cut

_LOGS = frozenset({"logsumexp", "log", "logaddexp"})


def _mixture(weights: torch.Tensor, logarithms: torch.Tensor, *, added: bool = False) -> torch.Tensor | None:
    """The logarithm of the sum of densities, each times its weight, or (``added``) plus its weight."""
    if weights.shape != logarithms.shape:
        return None
    highest = logarithms.amax(-1, keepdim=True)
    densities = (logarithms - highest).exp()
    return (weights + densities if added else weights * densities).sum(-1).log() + highest.squeeze(-1)


def _plainly_added(weights: torch.Tensor, logarithms: torch.Tensor) -> torch.Tensor | None:
    return (weights + logarithms.exp()).sum(-1).log() if weights.shape == logarithms.shape else None


def _not_logged(weights: torch.Tensor, logarithms: torch.Tensor) -> torch.Tensor | None:
    return (weights + logarithms).logsumexp(-1) if weights.shape == logarithms.shape else None


_RIGHT = "log_likelihood = torch.logsumexp(weights.log() + log_density, -1)"
_ADDED = Mistake(
    "ingredient_differs",
    "the weights are added to the densities where they multiply them: a component fits whatever its weight",
    _RIGHT,
    shifted=True,
)
_NOT_LOGGED = Mistake(
    "parameter_confused",
    "the weights themselves are added to the logarithms of the densities, where their own logarithms belong",
    _RIGHT,
    level="advice",
)


def _weights(cut: Cut) -> bool:
    """Whether the first argument is a softmax of layers alone along the last axis, and the second is computed from a
    target of the batch."""
    found, (weights, logarithms) = cut.slice, cut.arguments
    made = origin(found, weights)[1]
    tensor = found.values[weights].tensor
    return (
        made is not None
        and made.name == "softmax"
        and tensor.shape == found.values[logarithms].tensor.shape
        and not found.from_batch(weights)
        and bool(found.from_batch(logarithms))
    )


MIXTURE = Form(
    "the logarithm of a mixture's density",
    "https://publications.aston.ac.uk/id/eprint/373/",
    (Argument("weights", "shares", learned=True), Argument("logarithms", learned=True)),
    (
        one_part(_mixture, rises=True),
        *(
            one_part(
                way,
                _ADDED,
                rises=True,
                aim=Aim("the log-likelihood of the targets", _mixture, rises=True, held=(1,), shared=True),
            )
            for way in (functools.partial(_mixture, added=True), _plainly_added)
        ),
        one_part(_not_logged, _NOT_LOGGED, rises=True),
    ),
    ops=ADDITIONS | SUBTRACTIONS | _LOGS | frozenset({"squeeze"}),
    needs=(_LOGS,),
    suits=_weights,
    judges_direction=False,
)

FORMS = (MIXTURE,)
