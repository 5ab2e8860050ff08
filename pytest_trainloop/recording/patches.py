"""Patch public functions of torch that have no hooks, for the length of a run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ABSENT = object()


class Patches:
    """Attributes replaced by wrappers of the originals; ``remove`` restores them in reverse order."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()

    def put(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by ``wrap(original)``."""
        original = getattr(owner, name)
        own = vars(owner).get(name, _ABSENT)
        self._replaced.append((owner, name, own))
        setattr(owner, name, wrap(original))

    def remove(self) -> None:
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


@contextlib.contextmanager
def patched(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Replace one attribute for the length of a block."""
    with Patches() as patches:
        patches.put(owner, name, wrap)
        yield
