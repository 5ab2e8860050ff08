"""What is known of one loss function: its contract, calls of it in a chosen precision, and the smallest calls that
violate a property."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import places
from pytest_trainloop.core.errors import UsageError, UserCodeError
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.declare.losscontract import LossContract
from pytest_trainloop.instruments.losses.calls import Caller, CriterionRaised, kind
from pytest_trainloop.instruments.losses.search import Search
from pytest_trainloop.instruments.strategies.loss_cases import Case, Trait, described, inputs_of
from pytest_trainloop.instruments.strategies.losses import MOST_ROWS, cases
from pytest_trainloop.runs.float64 import double_precision
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Loss:
    """A contract with two callers of its criterion."""

    contract: LossContract
    as_built: Caller
    """Calls the criterion in the precision in which it was built."""
    float64: Caller
    """Runs every operation in float64."""

    @property
    def of_torch(self) -> bool:
        """Whether the criterion is torch's own: what it does is documented there, and the user cannot repair it."""
        criterion = _inner(self.contract.criterion)
        home = getattr(criterion, "__module__", "") if inspect.isroutine(criterion) else type(criterion).__module__
        return str(home).partition(".")[0] == "torch"


Property = Callable[[Loss, Case], Finding | None]
"""What is wrong with one call: cause, summary, measurement and proof, and the level where it is not a fault.

None where the property holds. Raises ``CannotDecide`` for a case that says nothing."""


class LossEvidence:
    """What is known of one loss. ``make`` builds its contract."""

    def __init__(self, make: Callable[[], Any], *, seed: int = 0, hypothesis_seed: str = "") -> None:
        self._make = make
        self._seed = seed
        self._hypothesis_seed = hypothesis_seed
        self._contract: LossContract | None = None
        self.own_steps = 0

    @property
    def make(self) -> Callable[[], Any]:
        """The function that builds the contract; a new function is called again."""
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

    def violations(
        self,
        holds: Property,
        *,
        only: Sequence[Trait] | None = None,
        least_rows: int = 1,
        most_rows: int = MOST_ROWS,
        share: float = 1.0,
        in_every_example: Collection[str] = (),
    ) -> Iterator[Finding]:
        """Findings of a property, each with the smallest case that shows its cause.

        Raises ``CannotDecide`` where no case could be judged.

        Parameters
        ----------
        only, least_rows, most_rows
            which cases are tried, as for ``strategies.cases``
        share
            the share of the usual number of examples
        in_every_example
            causes that are faults only where every example shows them
        """
        contract = self.contract
        with _quiet():
            loss = Loss(contract, Caller(contract, self._seed), Caller(self._in_float64(), self._seed, float64=True))
            violations = Search(self._seed, self._hypothesis_seed, share).violations(
                cases(contract, only=only, least_rows=least_rows, most_rows=most_rows), functools.partial(holds, loss)
            )
        for violation in violations:
            finding, times, examples = violation.finding, violation.times, violation.examples
            if finding.cause not in in_every_example or times == examples:
                yield replace(
                    finding,
                    summary=f"{self.name}: {finding.summary}",
                    measured=f"{finding.measured} ({times} of {examples} examples)",
                    culprits=(self.name,),
                    where=self.where,
                    smallest=described(contract, violation.case),
                )

    def _built(self) -> LossContract:
        seed_all(self._seed)
        try:
            contract = self._make()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:  # of the project's function
            reraise_ours(error)
            raise UserCodeError(user_error(error, "building the loss")) from error
        if not isinstance(contract, LossContract):
            name = getattr(getattr(self._make, "func", self._make), "__qualname__", "the function")
            other = " (for a loop the marker is trainloop)" if type(contract).__name__ == "TrainLoop" else ""
            place = places.of_function(self._make)
            raise UsageError(f"{name} returned {kind(contract)}; it must return a LossContract{other}", place=place)
        return contract

    def _in_float64(self) -> LossContract:
        """The same contract built in float64, so that tensors in the closure of its function are float64 as well; a
        module keeps the values of the first one."""
        if isinstance(self.contract.criterion, nn.Module):
            return replace(self.contract, criterion=copy.deepcopy(self.contract.criterion).double())
        with double_precision():
            return self._built()

    def _try(self, contract: LossContract) -> None:
        case = Case(rows=max(4, contract.min_rows))
        inputs = inputs_of(contract, case).to(torch.float32)
        try:
            Caller(contract, self._seed)(inputs, grad=False)
        except CriterionRaised as refused:
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
