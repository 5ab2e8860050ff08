"""Hooks that are in place for the length of a run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from pytest_trainloop.observe.events import Forward
    from pytest_trainloop.observe.watch import Watch


@contextlib.contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    """Remove the hooks at the end, whatever happens in between."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def call_from_outside(watch: Watch, module: nn.Module) -> Forward | None:
    """The call that is under way, where this module is the one that was called from outside any module."""
    forward = watch.thread.forward
    return forward if forward is not None and watch.book.path_of(module) == forward.module else None
