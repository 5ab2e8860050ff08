"""The one place that reaches into torch's private names, each with its test per supported version."""

from __future__ import annotations

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode


def is_functorch(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives inside ``vmap``, ``grad``, ``jvp`` or ``is_grads_batched``: unreadable outside of it."""
    functorch = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def take_off(mode: TorchFunctionMode) -> bool:
    """Take a function mode off this thread's stack wherever it stands, and say whether it stood there.

    Leaving its ``with`` block takes off whichever mode is on top, which may be one that the user's code has entered
    and not left yet (a generator with an open ``with torch.device(...)``).
    """
    above: list[TorchFunctionMode] = []
    found = False
    while not found and _len_torch_function_stack() > 0:
        top = _pop_mode()  # type: ignore[no-untyped-call]
        found = top is mode
        if not found:
            above.append(top)
    for one in reversed(above):
        _push_mode(one)  # type: ignore[no-untyped-call]
    return found


no_torch_function = torch._C.DisableTorchFunction
"""A context in which torch calls no function mode and no ``__torch_function__``: the user's do not see our calls."""
