"""The project's calls that come through this package: whether each was made, and what it gave or raised.

A seam is a place where this package runs inside a call of the project: a mode, or a patch. What it does around the
call may go wrong; to go on without it (``mistakes``), one must know whether the call was made already.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Seam:
    """One call of the project's that is under way."""

    __slots__ = ("error", "made", "out")

    def __init__(self) -> None:
        self.made = False
        self.out: Any = None
        self.error: BaseException | None = None
        """What it raised."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.seams: list[Seam] = []
        """The seams that this thread is in, the innermost last."""


HERE = _Here()


def opened() -> Seam:
    """A seam that this thread enters; ``closed`` must follow."""
    seam = Seam()
    HERE.seams.append(seam)
    return seam


def closed(seam: Seam) -> None:
    """Leave a seam."""
    seams = HERE.seams
    while seams and seams.pop() is not seam:  # a stop has interrupted the end of one inside it
        pass
    seam.error = None  # its traceback holds the frame that holds the seam


def passed_on(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the project's call, in the innermost seam."""
    seams = HERE.seams
    if not seams:
        return func(*args, **kwargs)
    seam = seams[-1]
    try:
        out = func(*args, **kwargs)
    except BaseException as error:
        seam.error = error
        raise
    seam.made, seam.out, seam.error = True, out, None
    return out
