"""A run in which whatever can move does: some parameters start elsewhere, and every rate is far higher.

A weight that rests at the bound of a projection moves from another start; one whose steps are rounded away, or kept
elsewhere until they are large enough, moves at a higher rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.gradients.dependence import mover

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.recording.watch import Watch

RAISED = 1e4
"""Factor on the rates: more than the 256 steps of half a spacing that bfloat16 can swallow."""


def displaced(names: Sequence[str]) -> Callable[[Watch], None]:
    """Moves the named parameters by half their root mean square, and lets them count as begun from there."""
    move = mover(names, jitter=False)

    def prepare(watch: Watch) -> None:
        move(watch)
        watch.book.begin_anew()

    return prepare
