"""The batches that an observed run draws from its own DataLoaders."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.torch_internals import loader_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.watch import Watch


@contextlib.contextmanager
def batches_taken(take: Callable[[int, Any], None], watch: Watch) -> Iterator[None]:
    """Call ``take`` with the number and the batch that a loader hands out, while the run is watched in full.

    The number counts all loaders of the block. What code of this package draws is left out.
    """
    taken = 0

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def following(iterator: Any) -> Any:
            nonlocal taken
            item = original(iterator)
            if watch.full and not watch.is_suspended:
                with watch.suspended():
                    take(taken, item)
                taken += 1
            return item

        return following

    kind, names = loader_calls()
    with patched(kind, names["next"], around):
        yield
