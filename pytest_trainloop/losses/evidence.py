"""What is known of one loss function: its contract, calls of it in a chosen precision, and the search for the smallest
call that breaks a property."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.finding import Finding
from pytest_trainloop.losscontract import LossContract
from pytest_trainloop.losses.calls import Caller, Refused, kind
from pytest_trainloop.losses.search import Found, Seen, search
from pytest_trainloop.runs.float64 import double_precision
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.user_traceback import user_error
from pytest_trainloop.strategies.loss_cases import Case, inputs_of, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hypothesis.strategies import SearchStrategy

    from pytest_trainloop.losses.search import Look


@dataclass(frozen=True, slots=True)
class Loss:
    """A contract with its callers: ``own`` calls the criterion as it was built, ``wide`` all in float64."""

    contract: LossContract
    own: Caller
    wide: Caller


class LossEvidence:
    """What is known of one loss. ``make`` builds its contract; ``options`` are those of the check at hand."""

    def __init__(self, make: Callable[[], Any], *, seed: int = 0, hypothesis_seed: str = "") -> None:
        self._make = make
        self._seed = seed
        self._hypothesis_seed = hypothesis_seed
        self._contract: LossContract | None = None
        self.own_steps = 0
        self.options: Mapping[str, Any] = {}

    @property
    def make(self) -> Callable[[], Any]:
        """The function that builds the contract; a new one is asked anew."""
        return self._make

    @make.setter
    def make(self, make: Callable[[], Any]) -> None:
        self._make, self._contract = make, None

    @property
    def offers(self) -> frozenset[str]:
        """The fields of the contract that were given."""
        return frozenset(f.name for f in fields(LossContract) if getattr(self.contract, f.name) is not None)

    @property
    def contract(self) -> LossContract:
        """The contract, once an ordinary call of its criterion gave a tensor."""
        if self._contract is None:
            with _quiet():
                contract = self._built()
                self._try(contract)
            self._contract = contract
        return self._contract

    @property
    def name(self) -> str:
        """What the project calls its criterion."""
        criterion = _inner(self.contract.criterion)
        return str(getattr(criterion, "__name__", None) or type(criterion).__name__)

    @property
    def where(self) -> str:
        """Where the criterion is written: file, line and its first line."""
        criterion = _inner(self.contract.criterion)
        code = type(criterion).forward if isinstance(criterion, nn.Module) else criterion
        return _source_line(code)

    @property
    def reduction(self) -> str:
        """What a plain call of the criterion gives."""
        return Caller(self.contract, self._seed).reduction

    @property
    def switches(self) -> bool:
        """Whether the criterion has a ``reduction`` to ask for another."""
        return Caller(self.contract, self._seed).switches

    @property
    def of_torch(self) -> bool:
        """Whether the criterion is torch's own: what it does is documented there, and nobody here can repair it."""
        criterion = _inner(self.contract.criterion)
        home = getattr(criterion, "__module__", "") if inspect.isroutine(criterion) else type(criterion).__module__
        return str(home).partition(".")[0] == "torch"

    def find(
        self, cases: SearchStrategy[Case], look: Callable[[Loss, Case], Any], *, share: float = 1.0
    ) -> list[Found]:
        """The smallest case for each cause that ``look`` names; raises ``CannotDecide`` where it could not judge one.

        ``look`` returns what it saw, or None where the property holds, and raises ``CannotDecide`` for a case that says
        nothing.
        """
        contract = self.contract
        with _quiet():
            loss = Loss(contract, Caller(contract, self._seed), Caller(self._in_double(), self._seed, wide=True))
            judge: Look = functools.partial(look, loss)
            return search(cases, judge, self._seed, self._hypothesis_seed, share)

    def finding(self, found: Found, repair: str, **more: Any) -> Finding:
        """What was found, as a finding with its smallest case."""
        seen = found.seen
        return Finding(
            cause=seen.cause,
            summary=f"{self.name}: {seen.summary}",
            measured=f"{seen.measured} ({found.times} of {found.of} examples)",
            shown_by=seen.shown_by,
            culprits=(self.name,),
            where=self.where,
            repair=repair,
            smallest=told(self.contract, found.case),
            **more,
        )

    def _built(self) -> LossContract:
        seed_all(self._seed)
        try:
            contract = self._make()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise UserCodeError(user_error(error, "building the loss")) from error
        if not isinstance(contract, LossContract):
            name = getattr(getattr(self._make, "func", self._make), "__qualname__", "the function")
            raise UsageError(f"{name} returned {kind(contract)}; it must return a LossContract")
        return contract

    def _in_double(self) -> LossContract:
        """The same contract built in float64, so that what its function closes over is float64, too; a module takes
        over the numbers of the first one."""
        if isinstance(self.contract.criterion, nn.Module):
            return replace(self.contract, criterion=copy.deepcopy(self.contract.criterion).double())
        with double_precision():
            return self._built()

    def _try(self, contract: LossContract) -> None:
        case = Case(rows=max(4, contract.min_rows))
        inputs = inputs_of(contract, case).to(torch.float32)
        try:
            Caller(contract, self._seed)(inputs, grad=False)
        except Refused as refused:
            shapes = ", ".join(str(tuple(t.shape)) for t in (*inputs.outputs, inputs.target) if t is not None)
            stage = f"calling the criterion with tensors of {shapes}"
            raise UserCodeError(user_error(refused.error, stage)) from refused.error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with preserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)  # a handful of numbers a call: more threads only wait for each other
        yield


def _inner(criterion: Any) -> Any:
    while isinstance(criterion, functools.partial):
        criterion = criterion.func
    return criterion


def _source_line(code: Any) -> str:
    from pytest_trainloop.recording.source import layer, place_of

    code = inspect.unwrap(code)
    found = getattr(code, "__code__", None)
    if found is None or layer(found.co_filename) != 2:
        return ""
    return str(place_of(found.co_filename, found.co_firstlineno))


__all__ = ["CannotDecide", "Found", "Loss", "LossEvidence", "Seen"]
