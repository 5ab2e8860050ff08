"""Calls of torch that come through this package, made as from the line that made them.

Python books a warning on a frame: what warns in C on the innermost one, what warns in Python on one as many frames up
as its ``stacklevel`` says. Where a mode or a patch of this package lies between, that frame is ours: a filter for the
user's module misses the warning, and equal warnings of two lines are shown as one. So such a call is made by a function
that has the file, the line and the globals of the caller.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.ours import is_our_file
from pytest_trainloop.recording.seams import HERE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

MOST_CALLS = 8192
"""Calls that are kept, at most."""

_KNOWN: dict[tuple[int, int], tuple[CodeType, FunctionType]] = {}
"""By the identity of the caller's code, and its instruction: to hash code, or to find the line, takes longer than the
call."""

_OURS: dict[str, bool] = {}


def _template(__trainloop_func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return __trainloop_func(*args, **kwargs)


def as_caller(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function as from the line that called this package, or the function of torch that did; in a seam, this is
    the project's call."""
    frame: FrameType | None = sys._getframe(1)
    made: FunctionType | None = None
    while frame is not None:
        code = frame.f_code
        if _OURS.get(code.co_filename) or (code.co_filename not in _OURS and _is_ours(code.co_filename)):
            frame = frame.f_back
        elif code.co_name == "handle_torch_function":
            frame = None if frame.f_back is None else frame.f_back.f_back  # past the function of torch that calls it
        else:
            known = _KNOWN.get((id(code), frame.f_lasti))
            made = known[1] if known is not None and known[0] is code else _made(frame)
            break
    seam = HERE.seams[-1] if HERE.seams else None
    try:
        out = func(*args, **kwargs) if made is None else made(func, args, kwargs)
    except BaseException as error:
        if seam is not None:
            seam.error = error
        raise
    if seam is not None:
        seam.made, seam.out, seam.error = True, out, None
    return out


def is_stand_in(code: CodeType) -> bool:
    """Whether a frame with this code is reported as its caller: its line is that of the caller's frame."""
    return code.co_varnames[:1] == _template.__code__.co_varnames[:1]


def _is_ours(filename: str) -> bool:
    ours = _OURS[filename] = is_our_file(filename)
    return ours


def _made(frame: FrameType) -> FunctionType:
    if len(_KNOWN) >= MOST_CALLS:
        _KNOWN.clear()
    code = _template.__code__.replace(
        co_filename=frame.f_code.co_filename,
        co_firstlineno=frame.f_lineno - 1,  # the call is on the line after
        co_name=frame.f_code.co_name,
    )
    made = FunctionType(code, frame.f_globals)
    _KNOWN[id(frame.f_code), frame.f_lasti] = (frame.f_code, made)
    return made
