"""The one place that reaches into torch's private names, each with its test per supported version."""

from __future__ import annotations

import torch


def is_functorch(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives inside ``vmap``, ``grad`` or ``jvp`` and cannot be read outside of it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
