"""A pair: the same project twice, once with a fault and once repaired."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from tests.helpers.discovery import Corpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop import TrainLoop


@dataclass(frozen=True, slots=True)
class Pair:
    """``faulty`` must fail ``check`` with ``cause``; ``fixed`` must pass every check."""

    name: str
    check: str
    cause: str
    _: KW_ONLY
    faulty: Callable[..., TrainLoop]
    fixed: Callable[..., TrainLoop]
    culprits: tuple[str, ...] = ()
    """Must all be among the finding's culprits."""
    where: str | None = None
    """Part of the source line at which the finding saw it."""
    change: str | None = None
    """Part of the source line that the finding says to change."""
    level: Literal["fault", "advice", "note"] = "fault"
    raises: str | None = None
    """Part of torch's own message where the faulty loop raises."""
    mentions: tuple[str, ...] = ()
    """Must all stand somewhere in the finding's text."""
    quick: bool = False
    """The cheapest pair of its cause, the one that ``pytest -m quick`` runs."""


PAIRS: Corpus[Pair] = Corpus("tests.loops.corpus")


def pair(name: str, check: str, cause: str, **fields: Any) -> None:
    """Register a ``Pair`` of these fields."""
    if name in PAIRS:
        raise ValueError(f"two pairs are named {name!r}")
    PAIRS[name] = Pair(name, check, cause, **fields)
