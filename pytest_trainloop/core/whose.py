"""Whose mistake an exception is: the project's, or this package's. Standard library only.

Code that calls the project's functions, or torch with the project's tensors, must expect exceptions. It must not hide
its own mistakes with them: every ``except Exception`` asks ``reraise_ours`` first.
"""

from __future__ import annotations

import contextlib
import opcode
import re
import sys
import traceback as tracebacks
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_trainloop.core.errors import (
    BrokenRun,
    CannotDecide,
    OwnMistake,
    TimeRanOut,
    TrainLoopError,
    Unreliable,
    UserCodeError,
)
from pytest_trainloop.core.paths import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

    Error = TypeVar("Error", bound=BaseException)
    T = TypeVar("T")

SIGNALS = (BrokenRun, CannotDecide, OwnMistake, TimeRanOut, TrainLoopError, Unreliable, UserCodeError)
"""Exceptions by which one part of this package tells another one something: never to be taken for the project's."""

_RAISES = frozenset({opcode.opmap["RAISE_VARARGS"], opcode.opmap["RERAISE"]})

_PASSES_ON = opcode.opmap["CALL_FUNCTION_EX"]
"""The instruction of ``function(*args, **kwargs)``: how this package passes a call of the project on."""

_ITERATES = opcode.opmap["FOR_ITER"]

_ARGUMENTS = re.compile(r"([\w.<>]+)\(\) (takes|missing|got) ")
"""How Python begins a ``TypeError`` about the arguments of a function: it is raised in the frame of the caller."""


def is_ours(error: BaseException) -> bool:
    """Whether an exception is a mistake of this package; its signals are none.

    It is if the innermost Python frame is one of the package's, but for what C code refuses there without a ``raise``
    statement although the project gave it:

    - a call that is passed on as it came, ``function(*args, **kwargs)``;
    - arguments that a function of the project does not take;
    - a ``RuntimeError`` or ``NotImplementedError``, which torch raises for tensors that it cannot take. Python's own
      of a dictionary that changes while it is iterated over is ours.
    """
    innermost = _innermost(error.__traceback__)
    if isinstance(error, SIGNALS) or getattr(error, "of_the_project", False):
        return False
    if innermost is None or not innermost.tb_frame.f_code.co_filename.startswith(PACKAGE):
        return False
    instruction = _instruction(innermost)
    if instruction in _RAISES:
        return True
    if isinstance(error, (RuntimeError, NotImplementedError)):
        return instruction == _ITERATES
    if isinstance(error, TypeError) and (refused := _ARGUMENTS.match(str(error))):
        return _is_function_of_ours(refused[1], innermost.tb_frame)
    return instruction != _PASSES_ON


def reraise_ours(error: BaseException) -> None:
    """Raise the exception again if it is a signal between parts of this package, or a mistake of this package."""
    if isinstance(error, SIGNALS) or is_ours(error):
        raise error


def reraise_raised(error: BaseException) -> None:
    """Raise the exception again if a ``raise`` statement of this package raised it: the caller expects that C code
    refuses tensors of the project's here, by whatever exception."""
    innermost = _innermost(error.__traceback__)
    if is_ours(error) and innermost is not None and _instruction(innermost) in _RAISES:
        raise error


@contextlib.contextmanager
def project_may_raise() -> Iterator[None]:
    """Leave the block quietly at an exception of the project's code."""
    try:
        yield
    except Exception as error:  # the caller gives the reason
        reraise_ours(error)


def of_the_project(error: Error) -> Error:
    """An exception that code of this package raises on purpose where the project's code is expected to."""
    error.of_the_project = True  # type: ignore[attr-defined]
    return error


def present(value: T | None, what: str) -> T:
    """A value that is there whenever this is called: that it is not is a mistake of this package."""
    if value is None:
        raise LookupError(f"{what} is asked for before it is known")
    return value


def mistake(error: BaseException) -> OwnMistake:
    """An exception that ended a part of this package, as text: with the last line of the package's own."""
    if isinstance(error, OwnMistake):
        return error
    first = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    frames = [f for f in tracebacks.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
    place = f"{Path(PACKAGE).name}/{_within(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = "".join(tracebacks.format_exception(type(error), error, error.__traceback__)).rstrip()
    return OwnMistake(f"{name}: {first}" if first else name, place=place, traceback=text)


def _within(filename: str) -> str:
    return Path(filename).relative_to(PACKAGE).as_posix()


def _innermost(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def _instruction(traceback: TracebackType) -> int:
    """What Python was doing in a frame as the exception passed."""
    return traceback.tb_frame.f_code.co_code[traceback.tb_lasti]


def _is_function_of_ours(qualified: str, caller: FrameType) -> bool:
    """Whether a name such as ``Half.begin`` is that of something in this package. A bare one counts only where the
    caller knows it: the project may have a function of the same name."""
    first, *rest = qualified.split(".")
    package = __name__.partition(".")[0]
    modules = [vars(m) for name, m in list(sys.modules.items()) if name.partition(".")[0] == package]
    for known in modules if rest else [caller.f_globals]:
        found: Any = known.get(first)
        if found is not None and str(getattr(found, "__module__", "")).startswith(f"{package}."):
            return True
    return False
