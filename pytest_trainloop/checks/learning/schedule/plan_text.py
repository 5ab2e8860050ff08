"""The wording that all findings on the length of a schedule share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pytest_trainloop.finding import Finding

if TYPE_CHECKING:
    from pytest_trainloop.runs.projection import Projected


def plan_finding(
    one: Projected,
    cause: str,
    summary: str,
    measured: str,
    shown_by: str,
    *,
    level: Literal["fault", "advice"] = "fault",
    culprits: tuple[str, ...] = (),
    repair: str = "",
    change: str = "",
) -> Finding:
    return Finding(
        cause=cause,
        level=level,
        summary=summary,
        measured=measured,
        shown_by=shown_by,
        culprits=culprits or (one.kind,),
        where=one.place,
        change=change or one.made_at,
        repair=repair,
    )


def rates_text(one: Projected, calls: int) -> str:
    """The rate at the start, in the middle and at the end of so many calls, in the group with the highest."""
    group = one.curve.leading
    middle, last = one.curve.rate(calls // 2)[group], one.curve.rate(calls)[group]
    return (
        f"learning rate {one.curve.rates[0][group]:.2g} at call 0, {middle:.2g} at call {calls // 2}, {last:.2g} at "
        f"call {calls}"
    )
