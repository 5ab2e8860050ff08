"""Searches of the heap that look among the objects of one run first."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


class Heap:
    """The objects that ``gc`` searches.

    ``gc.get_referrers`` goes through every object of the process once for each value that is asked for: minutes in a
    session that has imported much. What an earlier ``gc.freeze()`` set aside is left out.
    """

    def __init__(self) -> None:
        self._frozen = False

    @contextlib.contextmanager
    def of_this_block(self) -> Iterator[None]:
        """Leave out what was there before; not where the project has frozen objects itself, which would be lost."""
        if gc.get_freeze_count():
            yield
            return
        gc.freeze()
        self._frozen = True
        try:
            yield
        finally:
            self._thaw()

    def searched(self, search: Callable[[], list[T]]) -> list[T]:
        """What the search finds; made again among all objects where something has no name among those of the block: a
        variable of a module is older."""
        found = search()
        if self._frozen and not (found and all(one.name for one in found)):
            self._thaw()
            found = search()
        return found

    def _thaw(self) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
