"""A pair: the same project twice, once with a fault and once repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.loop import TrainLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """``faulty`` must fail ``check`` with ``cause``; ``fixed`` must pass every check.

    ``row`` is the row of the catalogue (where it has none, the ruling or the family of checks). ``culprits`` must all
    be among the finding's culprits, ``mentions`` must all stand somewhere in its text, ``where`` is part of the source
    line that it gives. ``raises`` is part of torch's own message where the faulty loop does not run through.
    """

    name: str
    row: str
    check: str
    cause: str
    faulty: Callable[..., TrainLoop]
    fixed: Callable[..., TrainLoop]
    culprits: tuple[str, ...] = ()
    where: str | None = None
    level: Literal["fault", "advice"] = "fault"
    raises: str | None = None
    mentions: tuple[str, ...] = ()


PAIRS: dict[str, Pair] = {}


def pair(
    name: str,
    row: str,
    check: str,
    cause: str,
    *,
    faulty: Callable[..., TrainLoop],
    fixed: Callable[..., TrainLoop],
    culprits: tuple[str, ...] = (),
    where: str | None = None,
    level: Literal["fault", "advice"] = "fault",
    raises: str | None = None,
    mentions: tuple[str, ...] = (),
) -> None:
    """Register one pair under a name of its own."""
    if name in PAIRS:
        raise ValueError(f"two pairs are named {name!r}")
    PAIRS[name] = Pair(
        name=name,
        row=row,
        check=check,
        cause=cause,
        faulty=faulty,
        fixed=fixed,
        culprits=culprits,
        where=where,
        level=level,
        raises=raises,
        mentions=mentions,
    )
