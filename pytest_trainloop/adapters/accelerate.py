"""A loop written with Accelerate needs no adapter, only a fresh ``Accelerator`` in one process."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pytest_trainloop.core.errors import UsageError


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
