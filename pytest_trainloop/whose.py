"""Whose mistake an exception is: the project's, or this package's. Standard library only.

Code that calls the project's functions, or torch with the project's tensors, must expect exceptions. It must not hide
its own mistakes with them: every ``except Exception`` asks ``reraise_ours`` first.
"""

from __future__ import annotations

import opcode
from typing import TYPE_CHECKING

from pytest_trainloop.errors import BrokenRun, CannotDecide, TimeRanOut, TrainLoopError, Unreliable, UserCodeError
from pytest_trainloop.paths import PACKAGE

if TYPE_CHECKING:
    from types import TracebackType

SIGNALS = (BrokenRun, CannotDecide, TimeRanOut, TrainLoopError, Unreliable, UserCodeError)
"""Exceptions by which one part of this package tells another one something: never to be taken for the project's."""

_RAISES = frozenset({opcode.opmap["RAISE_VARARGS"], opcode.opmap["RERAISE"]})

_PASSING_ON = frozenset({"__torch_function__", "__torch_dispatch__", "passed_on"})
"""Functions that only pass a call of the project on: what C code raises in them is the project's."""


def is_ours(error: BaseException) -> bool:
    """Whether an exception is a mistake of this package.

    It is if the innermost Python frame is one of the package's, with two exceptions, in which C code refuses what the
    project gave: an exception without a ``raise`` statement in a function that passes a call of the project on, and a
    ``RuntimeError`` or ``NotImplementedError`` without a ``raise`` statement (torch raises these for tensors that it
    cannot take).
    """
    innermost = _innermost(error.__traceback__)
    if innermost is None or not innermost.tb_frame.f_code.co_filename.startswith(PACKAGE):
        return False
    code = innermost.tb_frame.f_code
    if code.co_code[innermost.tb_lasti] in _RAISES:
        return True
    return code.co_name not in _PASSING_ON and not isinstance(error, (RuntimeError, NotImplementedError))


def reraise_ours(error: BaseException) -> None:
    """Raise the exception again if it is a signal between parts of this package, or a mistake of this package."""
    if isinstance(error, SIGNALS) or is_ours(error):
        raise error


def _innermost(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback
