"""Contracts that a project, or a library, adds to the table."""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core import places
from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.callcontract import CallContract
from pytest_trainloop.declare.losscontract import LossContract
from pytest_trainloop.declare.refusals import an
from pytest_trainloop.instruments.losses.table.entry import Entry
from pytest_trainloop.instruments.losses.table.flags import require_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import CodeType


@dataclass(frozen=True, slots=True)
class Registered:
    """What was registered for the code of one function."""

    entries: tuple[Entry, ...]
    like: tuple[Mapping[str, object], ...]
    """For each the flags that a call must share: those with which its contract was tested."""


_REGISTERED: dict[CodeType, Registered] = {}

_TESTED: dict[CodeType, Registered] = {}
"""The contracts of the loss functions that are tested together with the loop under judgement."""


def register_contract(function: Any, contract: LossContract | CallContract) -> None:
    """Let a loss function be judged in loops by what it takes.

    >>> register_contract(dice_loss, CallContract(arguments={"probs": "probabilities", "mask": "binary"}))
    >>> register_contract(FocalLoss, LossContract(criterion=FocalLoss(), expects="logits", num_classes=10))

    Parameters
    ----------
    function
        a function; or a class of modules or an instance of it, whose ``forward`` counts: the contract holds for every
        instance of the class. Functions in C and compiled ones cannot be seen
    contract
        what it takes: a ``CallContract``, argument by argument; or the ``LossContract`` with which it is tested, which
        holds for calls with the same flags as its criterion's

    Raises
    ------
    UsageError
        the function has no code of Python's; the contract names a parameter or a flag that it has not; or the criterion
        of the ``LossContract`` is another function
    """
    try:
        code, row = _row(function, contract)
    except UsageError as error:
        raise UsageError(str(error), place=places.shown(*places.caller())) from None
    known = _REGISTERED.get(code, Registered((), ()))
    if row[0] not in known.entries:
        _REGISTERED[code] = Registered((*known.entries, row[0]), (*known.like, row[1]))


@contextlib.contextmanager
def contracts_for_calls(contracts: Iterable[LossContract]) -> Iterator[None]:
    """Let these contracts count for the calls of their criteria meanwhile, in place of those of an outer call.

    What cannot be seen in a loop (a lambda, a function in C) is left out.
    """
    before = dict(_TESTED)
    _TESTED.clear()
    for contract in contracts:
        with contextlib.suppress(UsageError):
            code, row = _row(contract.criterion, contract)
            known = _TESTED.get(code, Registered((), ()))
            _TESTED[code] = Registered((*known.entries, row[0]), (*known.like, row[1]))
    try:
        yield
    finally:
        _TESTED.clear()
        _TESTED.update(before)


def _row(function: Any, contract: LossContract | CallContract) -> tuple[CodeType, tuple[Entry, Mapping[str, object]]]:
    """The code of a function, its row, and the flags that a call must share."""
    code = _seen_code(function, contract)
    flags: Mapping[str, object] = {}
    if isinstance(contract, LossContract):
        if code_of(contract.criterion) is not code:
            raise UsageError(
                f"register_contract got {_name(function)} with a LossContract of another criterion, "
                f"{_name(contract.criterion)}; a contract of {_name(function)} itself is needed, or a CallContract"
            )
        flags = flags_of(contract.criterion)
        made = call_contract(contract, code)
        if made is None:
            raise UsageError(
                "register_contract got a LossContract whose criterion does not take its outputs and its target by "
                "position; give a CallContract, argument by argument"
            )
        contract = made
    require_names(function, code, contract)
    name = getattr(function, "__qualname__", code.co_name)
    return code, (Entry(names=(name,), contracts=(contract,), page=contract.page), flags)


def _seen_code(function: Any, contract: object) -> CodeType:
    """The code by which calls of a function are recognised; refuses what has none, and what is no contract."""
    code = code_of(function)
    if isinstance(function, (LossContract, CallContract)) and not isinstance(contract, (LossContract, CallContract)):
        kind = type(function).__name__
        raise UsageError(f"register_contract got the {kind} first; the function is needed first, then the contract")
    if code is None:
        given = f"{_name(function)}, which has no Python code" if callable(function) else an(function)
        raise UsageError(f"register_contract got {given}; a function or a class of modules is needed")
    if not isinstance(contract, (LossContract, CallContract)):
        raise UsageError(
            f"register_contract got {an(contract)} for {_name(function)}; a LossContract or CallContract is needed"
        )
    return code


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def registered(code: CodeType) -> Registered | None:
    """What was registered for this code, and after it what the tests next to the loop say."""
    tested, known = _TESTED.get(code), _REGISTERED.get(code)
    if tested is None or known is None:
        return tested or known
    return Registered((*known.entries, *tested.entries), (*known.like, *tested.like))


def forget(function: Any) -> None:
    """Take what was registered for a function out again."""
    code = code_of(function)
    if code is not None:
        _REGISTERED.pop(code, None)


def code_of(function: Any) -> CodeType | None:
    """The code of a function, or of a module's or a class's ``forward``."""
    while isinstance(function, functools.partial):
        function = function.func
    forward = getattr(function, "forward", None)
    if forward is not None:
        function = forward
    return places.code_of(function)


def flags_of(criterion: Callable[..., Any]) -> dict[str, object]:
    """The plain settings of a criterion: of a module its attributes, of a function the defaults of its parameters, and
    what a partial gives."""
    given: dict[str, object] = {}
    while isinstance(criterion, functools.partial):
        given = dict(criterion.keywords) | given
        criterion = criterion.func
    if hasattr(criterion, "forward"):
        return {name: value for name, value in vars(criterion).items() if plain(value) and name != "training"}
    try:
        parameters = inspect.signature(criterion).parameters.values()
    except (TypeError, ValueError):
        return given
    return {p.name: p.default for p in parameters if p.default is not p.empty and plain(p.default)} | given


def plain(value: object) -> bool:
    """Whether it is a setting that can be compared."""
    return isinstance(value, (bool, int, float, str, type(None)))


def call_contract(contract: LossContract, code: CodeType) -> CallContract | None:
    """The same promise by the names of the parameters; None where they are not given by position."""
    names = [n for n in code.co_varnames[: code.co_argcount] if n != "self"]
    views = contract.views or (2 if contract.expects == "embeddings" and contract.target != "index" else 1)
    of_pair = contract.target == "pair"
    if of_pair:
        words: list[str] = [contract.expects] * max(2, views)
    else:
        target = "labels" if contract.expects == "embeddings" and contract.target == "index" else contract.target
        words = [*[contract.expects] * views, target]
    if len(names) < len(words):
        return None
    return CallContract(
        arguments=dict(zip(names, words, strict=False)),
        class_dim=contract.class_dim,
        ignore_index=contract.ignore_index,
        labels=contract.labels,
    )
