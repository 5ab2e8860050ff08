"""Passes over a DataLoader that end after a few batches: what a script does between epochs comes within the watched
steps."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import batches_given, loader_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SUGGESTED = 8
"""Batches of a pass that are proposed: the 30 steps of a script then hold three ends of an epoch."""


class Passes:
    """The passes of one run over its DataLoaders. Each ends after ``most`` batches; with 0, where it ends alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begun = self._ended = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Entered last, so that what records the passes sees none end that is cut."""
        kind, names = loader_calls()
        with Patches() as patches:
            patches.put(kind, names["next"], self._around)
            if self._most:
                patches.put(DataLoader, "__len__", self._shorter)
            yield

    def remark(self, *, stopped: bool) -> str:
        """What the page says of the passes."""
        batches = f"{self._most or SUGGESTED} batch{'es' * (self._most != 1)}"
        if self._most:
            if self._begun:
                return f"each pass over a DataLoader ended after {batches} (--limit-batches)"
            return "no DataLoader was iterated, so --limit-batches changed nothing"
        if stopped and self._begun and not self._ended:
            limit = f"--limit-batches={SUGGESTED}"
            return f"no epoch came to its end: {limit} ends each pass over a DataLoader after {batches}"
        return ""

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def following(iterator: Any) -> Any:
            self._begun = True
            cut = bool(self._most) and batches_given(iterator) >= self._most
            try:
                return passed_on(_end if cut else original, (iterator,), {})
            except StopIteration:
                self._ended = True
                raise

        return following

    def _shorter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def length(loader: Any) -> Any:
            return min(self._most, passed_on(original, (loader,), {}))

        return length


def _end(_iterator: Any) -> None:
    raise StopIteration
