"""Patch public functions of torch that have no hooks, for the length of a run.

A mistake of this package in what takes a function's place gives what the function itself gives (``mistakes``).
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.mistakes import guarded
from pytest_trainloop.recording.torch_internals import apply_of

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
        """Replace ``owner.name`` by ``wrap(original)``.

        Where it is a class method, what takes its place makes the project's call by ``passed_on``.
        """
        original = getattr(owner, name)
        own = vars(owner).get(name, _ABSENT)
        self._replaced.append((owner, name, own))
        setattr(owner, name, _guarded(wrap, original))

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


def _guarded(wrap: Callable[[Callable[..., Any]], Any], original: Any) -> Any:
    if isinstance(original, type):
        return wrap(original)

    def of_class(cls: type, *args: Any, **kwargs: Any) -> Any:
        return apply_of(cls, original)(*args, **kwargs)

    if getattr(original, "__self__", None) is not None and isinstance(original.__self__, type):
        own = wrap(original)
        return classmethod(guarded(own.__func__, of_class)) if isinstance(own, classmethod) else own

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return as_caller(original, args, kwargs)

    own = wrap(called)
    return guarded(own, original) if isinstance(own, types.FunctionType) else own
