"""Losses of survival models: Cox's partial likelihood."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from pytest_trainloop.formulas.form import Argument, Form, Mistake, Variant, cost, single

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.formulas.cut import Cut


def _partial(
    risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor, *, before: bool = False, censored: bool = False
) -> torch.Tensor | None:
    risk, time, event = risk.flatten(), time.flatten(), event.flatten().to(risk.dtype)
    if not risk.shape == time.shape == event.shape:
        return None
    at_risk = time[None, :] <= time[:, None] if before else time[None, :] >= time[:, None]
    total = risk[None, :].expand(len(risk), -1).masked_fill(~at_risk, -math.inf).logsumexp(1)
    return ((total - risk) * (1 - event if censored else event)).sum()


def _by_events(
    risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor, *, before: bool = False, censored: bool = False
) -> torch.Tensor | None:
    """The same as a mean over the events."""
    found = _partial(risk, time, event, before=before, censored=censored)
    counted = 1 - event.to(risk.dtype) if censored else event.to(risk.dtype)
    return None if found is None else found / counted.sum()


_PARTIAL = "risk set of event i: all j with time[j] >= time[i]: sort by time, latest first, then logcumsumexp(risk)"
_BEFORE = Mistake(
    "turned_round",
    "the risk set of an event holds those whose time is over, and not those still at risk",
    _PARTIAL,
)
_CENSORED = Mistake(
    "turned_round",
    "the censored rows are counted as events, and the events are left out",
    "multiply by event (1 where it was observed), not by its complement",
)


def _rows(cut: Cut) -> bool:
    risk, time, event = cut.recorded
    return (
        cut.value.numel() == 1
        and risk.numel() == time.numel() == event.numel()
        and len(time.unique()) > 2
        and len(event.unique()) == 2
    )


COX = Form(
    "Cox's partial likelihood",
    "https://doi.org/10.1111/j.2517-6161.1972.tb00899.x",
    (
        Argument("risk", learned=True),
        Argument("time", learned=False),
        Argument("event", "labels", learned=False),
    ),
    tuple(
        Variant(single(functools.partial(way, **other)), cost(mistake), mistake)
        for other, mistake in (({}, None), ({"before": True}, _BEFORE), ({"censored": True}, _CENSORED))
        for way in (_partial, _by_events)
    ),
    needs=(frozenset({"logcumsumexp", "logsumexp", "cumsum", "exp"}),),
    suits=_rows,
)

FORMS = (COX,)
