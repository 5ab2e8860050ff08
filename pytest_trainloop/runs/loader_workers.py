"""Worker processes of DataLoaders end with the run that started them.

An iterator ends its workers when it is freed. Where its last reference goes away that takes milliseconds. One that is
part of a cycle (a trainer that its model knows) is freed by the garbage collector, some time later and together with
the queues to its workers: they are closed first, no worker hears that it shall end, and each is waited for 5 s. So the
collector is called at the end of a run that left workers behind, while their queues are held here. What is still alive
then is held by the user's own code, which goes on to use it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from typing import TYPE_CHECKING

from pytest_trainloop.recording.torch_internals import loader_workers

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def workers_ended() -> Iterator[None]:
    """End the workers that were started in the block and are held by nothing any more."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        started = set(multiprocessing.active_children()) - before
        queues = [ways for workers, ways in loader_workers() if started & set(workers)] if started else []
        if queues:
            gc.collect()
