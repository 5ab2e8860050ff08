"""How much of a signal is its source: the scale-invariant ratio of signal to distortion (SI-SDR, SI-SNR)."""

from __future__ import annotations

import functools

import torch

from pytest_trainloop.instruments.formulas.form import Argument, Form, Mistake, one_part
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import DIVISIONS

ENERGY_OF_THE_ESTIMATE = Mistake(
    "turned_round",
    "the projection on the source is divided by the energy of the estimate: the ratio depends on how loud it is",
    "target = (estimate * source).sum(-1, keepdim=True) * source / (source ** 2).sum(-1, keepdim=True)",
    otherwise="advice",
)


def _ratio(
    estimate: torch.Tensor, source: torch.Tensor, *, eps: float, centred: bool, own: bool
) -> torch.Tensor | None:
    if estimate.shape != source.shape or estimate.shape[-1] < 3:
        return None
    if centred:
        estimate, source = (x - x.mean(-1, keepdim=True) for x in (estimate, source))
    energy = ((estimate if own else source) ** 2).sum(-1, keepdim=True)
    target = (estimate * source).sum(-1, keepdim=True) * source / (energy + eps)
    noise = ((estimate - target) ** 2).sum(-1)
    return torch.log((target**2).sum(-1) / (noise + eps) + eps)


FORMS = (
    Form(
        "the scale-invariant ratio of signal to distortion",
        "https://arxiv.org/abs/1811.02508",
        (Argument("estimate", learned=True), Argument("source", learned=False)),
        tuple(
            one_part(
                functools.partial(_ratio, centred=centred, own=own),
                mistake,
                rises=True,
                aim=Aim("the ratio", functools.partial(_ratio, centred=centred, own=False), rises=True),
            )
            for own, mistake in ((False, None), (True, ENERGY_OF_THE_ESTIMATE))
            for centred in (True, False)
        ),
        needs=(DIVISIONS, frozenset({"log", "log10", "log2"}), frozenset({"sum", "dot", "einsum", "bmm", "matmul"})),
        numbers={"eps": (0.0,)},
        among=lambda name, number: 0 < number <= 1e-4,
        suits=lambda cut: cut.recorded[0].shape == cut.recorded[1].shape and cut.divisions >= 2,
        farthest=True,
    ),
)
