"""Losses of survival models: Cox's partial likelihood."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.formulas.form import Argument, Form, Mistake, one_part
from pytest_trainloop.instruments.formulas.trial import Aim

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.instruments.formulas.cut import Cut


def _partial(
    risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor, *, before: bool = False, censored: bool = False
) -> torch.Tensor | None:
    risk, time, event = risk.flatten(), time.flatten(), event.flatten().to(risk.dtype)
    if not risk.shape == time.shape == event.shape:
        return None
    # by order and not by a table of pairs: a map of pixels has too many; rows of one time are at risk together
    order = time.argsort(descending=not before)
    _, group, sizes = torch.unique_consecutive(time[order], return_inverse=True, return_counts=True)
    total = risk[order].logcumsumexp(0)[sizes.cumsum(0) - 1][group]
    return ((total - risk[order]) * (1 - event if censored else event)[order]).sum()


def _by_events(
    risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor, *, before: bool = False, censored: bool = False
) -> torch.Tensor | None:
    """The same as a mean over the events."""
    found = _partial(risk, time, event, before=before, censored=censored)
    counted = 1 - event.to(risk.dtype) if censored else event.to(risk.dtype)
    return None if found is None else found / counted.sum()


def _sorted(
    form: Callable[..., torch.Tensor | None],
    risk: torch.Tensor,
    time: torch.Tensor,
    event: torch.Tensor,
    *,
    latest: bool,
    **ways: bool,
) -> torch.Tensor | None:
    """A form of risks whose rows lie in the order of time already: the loop sorted what it gave its network."""
    order = time.flatten().argsort(descending=latest)
    return form(risk, time.flatten()[order], event.flatten()[order], **ways)


_SORTS = frozenset({"argsort", "sort"})
_PARTIAL = "risk set of event i: all j with time[j] >= time[i]: sort by time, latest first, then logcumsumexp(risk)"
_BEFORE = Mistake(
    "turned_round",
    "the risk set of an event holds those whose time is over, and not those still at risk",
    _PARTIAL,
    at=_SORTS,
)
_CENSORED = Mistake(
    "turned_round",
    "the censored rows are counted as events, and the events are left out",
    "multiply by event (1 where it was observed), not by its complement",
)


def _rows(cut: Cut) -> bool:
    risk, time, event = cut.recorded
    one_a_row = cut.value.numel() == 1 and risk.numel() == time.numel() == event.numel()
    one_a_row = one_a_row and bool((time > 0).any())  # counted from the end (odd: patients_by_time_before_the_end)
    return one_a_row and len(set(time.flatten().tolist())) > 2 and len(set(event.flatten().tolist())) == 2


_OBSERVED = ("event", "status", "observed", "death", "dead", "died", "failure", "uncensored")


def _of_events(cut: Cut) -> bool:
    """Whether the batch names what was observed: without a name 1 may mean a censored row as well."""
    leaf = cut.slice.values[cut.arguments[2]]
    name = "" if leaf.path is None else nested.shown(leaf.path).lower()
    return _rows(cut) and any(word in name for word in _OBSERVED)


def _form(suits: Callable[[Cut], bool], *ways: tuple[Mistake | None, dict[str, Any]], given: bool = True) -> Form:
    """``given``: the rows lie as in the batch."""
    of = (_partial, _by_events)
    if not given:
        ways = tuple((mistake, {"latest": latest, **way}) for mistake, way in ways for latest in (True, False))
    return Form(
        "Cox's partial likelihood",
        "https://doi.org/10.1111/j.2517-6161.1972.tb00899.x",
        (
            Argument("risk", learned=True),
            Argument("time", learned=False),
            Argument("event", "labels", learned=False),
        ),
        tuple(
            one_part(
                functools.partial(form, **way) if given else functools.partial(_sorted, form, **way),
                mistake,
                aim=Aim(
                    "the partial likelihood's cost of the events",
                    _by_events if given else functools.partial(_sorted, _by_events, latest=way["latest"]),
                ),
            )
            for mistake, way in ways
            for form in of
        ),
        needs=(frozenset({"logcumsumexp", "logsumexp", "cumsum", "exp"}), *(() if given else (_SORTS,))),
        suits=suits,
    )


COX = _form(_rows, (None, {}), (_BEFORE, {"before": True}))
CENSORED = _form(_of_events, (_CENSORED, {"censored": True}))
SORTED = _form(_rows, (None, {}), (_BEFORE, {"before": True}), given=False)

FORMS = (COX, CENSORED, SORTED)
