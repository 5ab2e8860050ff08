"""A pair: one loss twice, once with a fault and once repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop import LossContract
from tests.helpers.discovery import Corpus

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class LossPair:
    """``faulty`` must fail ``check`` with ``cause``; ``fixed`` must pass every property and not name it."""

    name: str
    check: str
    cause: str
    faulty: LossContract
    fixed: LossContract
    level: Literal["fault", "advice"]


PAIRS: Corpus[LossPair] = Corpus("tests.losses.corpus")


def pair(
    check: str,
    cause: str,
    faulty: Callable[..., Any],
    fixed: Callable[..., Any],
    *,
    level: Literal["fault", "advice"] = "fault",
    name: str = "",
    fixed_contract: dict[str, Any] | None = None,
    **contract: Any,
) -> None:
    """Register one pair, named after its cause and its function; ``contract`` is that of both, but for what
    ``fixed_contract`` changes."""
    name = name or f"{cause}-{getattr(faulty, '__name__', type(faulty).__name__)}"
    if name in PAIRS:
        raise ValueError(f"two pairs are named {name!r}")
    PAIRS[name] = LossPair(
        name,
        check,
        cause,
        LossContract(criterion=faulty, **contract),
        LossContract(criterion=fixed, **{**contract, **(fixed_contract or {})}),
        level,
    )
