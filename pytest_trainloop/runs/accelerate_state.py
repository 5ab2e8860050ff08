"""The state of accumulation windows that Accelerate keeps for the whole process."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def gradient_state_kept() -> Iterator[None]:
    """Restore Accelerate's view of where in an accumulation window the process is.

    All accelerators share it: a run that ends inside a window leaves ``sync_gradients`` off, and a later loop without
    ``accumulate()`` would never step. Settings stay: an accelerator made inside lives on.
    """
    before = _gradient_state()
    sync_gradients = before.get("sync_gradients", True)
    references = list(before.get("_dataloader_references_ref", [None]))
    try:
        yield
    finally:
        after = _gradient_state()
        if after:
            after["sync_gradients"] = sync_gradients
            after["_dataloader_references_ref"] = references


def _gradient_state() -> dict[str, Any]:
    """The dictionary that every ``GradientState`` shares; empty where Accelerate was not used so far."""
    state = sys.modules.get("accelerate.state")
    return state.GradientState._shared_state if state else {}


def forget_process() -> None:
    """Have Accelerate find out again what kind of process this is: a fork has other ranks than the one that it was."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
