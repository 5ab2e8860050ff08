"""Put a watcher in front of a public function where torch has no hook for it, for the time of a run only."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ABSENT = object()


class Taps:
    """Attributes replaced by watchers, put back in reverse order by ``remove``.

    ``torch.autograd.backward`` is the one door through which ``Tensor.backward`` and direct calls both pass, at
    either density; schedulers and
    gradient scalers have no hooks of their own.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, watcher: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by ``watcher(original)``."""
        original = getattr(owner, name)
        own = vars(owner).get(name, _ABSENT)
        self._replaced.append((owner, name, own))
        setattr(owner, name, watcher(original))

    def remove(self) -> None:
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


@contextlib.contextmanager
def tapped(owner: Any, name: str, watcher: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """One attribute replaced by a watcher, for the length of a block."""
    taps = Taps()
    taps.put(owner, name, watcher)
    try:
        yield
    finally:
        taps.remove()
