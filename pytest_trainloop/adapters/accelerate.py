"""A loop written with Accelerate is handed over as it is; only what it keeps for the whole process needs care."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_trainloop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def fresh_accelerator(**options: Any) -> Any:
    """An ``accelerate.Accelerator`` with these options, whatever accelerators the process made before.

    ``Accelerator`` refuses a second mixed precision or device in one process; with this one they can be knobs:

    >>> @pytest.mark.trainloop
    ... def test_train(accumulate=1, precision="fp32"):
    ...     mixed = {"fp32": "no"}.get(precision, precision)
    ...     accelerator = fresh_accelerator(gradient_accumulation_steps=accumulate, mixed_precision=mixed)

    An accelerator made before takes on these settings as well.

    Parameters
    ----------
    options
        the keywords of ``Accelerator``

    Raises
    ------
    UsageError
        accelerate is not installed
    """
    try:
        accelerate = import_module("accelerate")
    except ImportError as error:
        raise UsageError(
            f"fresh_accelerator needs the package accelerate, which cannot be imported ({error})"
        ) from error
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(**options)


@contextmanager
def gradient_state_kept() -> Iterator[None]:
    """Give back Accelerate's view of where in an accumulation window the process is.

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
