"""The evidence of a run that was watched from outside: a record, and no second look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.wording import some, them

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.checks.loss.loss_contract.recorder import Contracts
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_candidates import Kind
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import Cut
    from pytest_trainloop.gradients.dependence import Dependence
    from pytest_trainloop.recording.record import Record


class WatchedOnce:
    """The evidence of one run that can't be repeated."""

    offers = frozenset({"fit", "run"})
    options: Mapping[str, Any] = {}
    knobs: Mapping[str, str] = {}

    def __init__(self, record: Record, contracts: Contracts | None = None) -> None:
        self._record = record
        self._contracts = contracts

    def contracts(self) -> Contracts:
        if self._contracts is None:
            raise CannotDecide("the calls of loss functions were not looked at in this run")
        return self._contracts

    def has_knob(self, name: str) -> bool:
        return False

    def declared(self, name: str) -> bool | None:
        return None

    def run(self, **knobs: Any) -> Record:
        return self._record

    def loaded(self) -> bool:
        """Whether weights were loaded cannot be told from one run: what that would excuse is excused."""
        return True

    def dependence(self, names: Sequence[str]) -> dict[str, Dependence]:
        raise CannotDecide(
            f"{some(names)}: no gradient was seen; whether the loss depends on {them(names)} takes further runs: "
            "return a TrainLoop from a marked test"
        )

    def cut(self, names: Sequence[str], kinds: set[Kind]) -> tuple[Cut | None, set[str]]:
        return None, set()

    def starts_at_saddle(self, names: Sequence[str]) -> dict[str, float]:
        return {}

    def exposed(self, names: Sequence[str]) -> set[str]:
        return set()

    def __getattr__(self, name: str) -> Any:
        """What takes further runs of the loop."""
        return _refused


def _refused(*_args: Any, **_kwargs: Any) -> Any:
    raise CannotDecide("this takes further runs of the loop: return a TrainLoop from a marked test")
