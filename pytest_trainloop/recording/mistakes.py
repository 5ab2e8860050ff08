"""Mistakes of this package inside the project's calls: passed over there, and noted on the record of the run.

A hook, a mode or a patch runs inside a call of the project. What goes wrong in it must not end a script that ends well
alone: the call goes on as torch makes it, and the checks that read the record end as errors. Each place where the
project's calls come through this package asks ``passed_over``.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.paths import PACKAGE
from pytest_trainloop.core.whose import SIGNALS, mistake
from pytest_trainloop.recording.as_caller import as_caller, is_stand_in
from pytest_trainloop.recording.seams import closed, opened
from pytest_trainloop.recording.source import layer
from pytest_trainloop.recording.torch_internals import MODULE_CALLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.errors import OwnMistake
    from pytest_trainloop.recording.seams import Seam

MOST_MISTAKES = 100
"""Mistakes that are noted, at most."""

_RECORDS: list[list[OwnMistake]] = []
"""Where the runs under way note mistakes, the innermost last."""

_OWN_CALLS = frozenset({"__call__", "__init__", "__iter__", "__next__", "__getitem__"})
"""Methods with underscores that this package calls for what they do; the others are asked by looking at an object."""


@contextlib.contextmanager
def noted_on(record: list[OwnMistake]) -> Iterator[None]:
    """Note the mistakes that are made in this block, in any thread."""
    _RECORDS.append(record)
    try:
        yield
    finally:
        for place in range(len(_RECORDS) - 1, -1, -1):
            if _RECORDS[place] is record:
                del _RECORDS[place]
                break


def passed_over(error: Exception) -> bool:
    """Whether the project's call goes on in spite of this exception, which was raised in code of this package that
    looks at it. It is noted then.

    It does not where the exception is a message between parts of this package, or was raised by a function of the
    project that an experiment has called; nor where no run is under way that could note it.
    """
    if not _RECORDS or isinstance(error, SIGNALS) or type(error).__module__.startswith(_PACKAGE) or _is_theirs(error):
        return False
    record = _RECORDS[-1]
    if len(record) < MOST_MISTAKES:
        record.append(_described(error))
    return True


_PACKAGE = __name__.partition(".")[0]


def _is_theirs(error: Exception) -> bool:
    """Whether a function or a module of the project raised it, and not an object that was only looked at."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code in MODULE_CALLS:
            return True
        if layer(code.co_filename) == 2 and not is_stand_in(code):
            name = code.co_name
            return not (name.startswith("__") and name.endswith("__")) or name in _OWN_CALLS
    return False


def _described(error: Exception) -> OwnMistake:
    """The exception with the innermost line of this package that does not only pass a call on."""
    found = mistake(error)
    ours: list[str] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        if not filename.startswith(PACKAGE):
            continue
        if frame.f_code.co_name in _SEAMS:
            ours.append("")
        elif not filename.endswith(_PASSING_ON):
            ours.append(f"{_PACKAGE}/{filename.removeprefix(PACKAGE)}:{line}".replace("\\", "/"))
        else:
            while ours and ours.pop():
                pass  # a mode below, which passes on what a look of the mode above asks
    found.place = next(filter(None, reversed(ours)), found.place)
    return found


_SEAMS = frozenset({"__torch_function__", "__torch_dispatch__", "guarded_call"})
_PASSING_ON = ("seams.py", "as_caller.py")
"""The functions of this package that enter a seam, and the files that make the call in it."""


class PassingOver:
    """A ``with`` block of this package inside a call of the project: a mistake in it ends the block alone."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return isinstance(error, Exception) and passed_over(error)


PASSING_OVER = PassingOver()


class Leaving:
    """A context of this package around the project's code: a mistake as it is left is passed over."""

    def __init__(self, inner: contextlib.AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> Any:
        return self._inner.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._inner.__exit__(kind, error, trace)
        except Exception as other:
            if other is error or not passed_over(other):
                raise


def goes_on(seam: Seam, error: Exception) -> bool:
    """Whether the project's call goes on after an exception in this seam (``ended``). What the call itself raised is
    the project's."""
    return error is not seam.error and passed_over(error)


def ended(seam: Seam, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What the project's call gives or raises; it is made where it was not yet."""
    if seam.made:
        return seam.out
    if seam.error is not None:
        raise seam.error
    return as_caller(func, args, kwargs)


def guarded(own: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this package that replaces one of the project's or of torch: a mistake in it gives
    what the original gives. It must call that by ``passed_on`` or ``as_caller``."""

    @functools.wraps(own)
    def guarded_call(*args: Any, **kwargs: Any) -> Any:
        call = opened()
        try:
            try:
                return own(*args, **kwargs)
            except Exception as error:
                if not goes_on(call, error):
                    raise
            return ended(call, original, args, kwargs)
        finally:
            closed(call)

    return guarded_call


def unnoticed(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this package that Python or torch calls besides the project's own: a mistake in it gives None."""

    @functools.wraps(own)
    def seam(*args: Any, **kwargs: Any) -> Any:
        with PASSING_OVER:
            return own(*args, **kwargs)

    return seam
