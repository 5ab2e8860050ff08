"""The state that an optimizer keeps for a parameter, in words."""

from __future__ import annotations

from typing import Any

import torch

from pytest_trainloop.instruments.tracing.arguments import floats


def described(state: Any) -> str:
    """Dtypes of the state that an optimizer keeps for a parameter, and the share of it that is zero or not finite."""
    parts = []
    for name, value in state.items() if isinstance(state, dict) else ():
        for t in floats([value]) if isinstance(value, torch.Tensor) and value.numel() > 1 else ():
            zero, bad = float((t == 0).float().mean()), float((~t.isfinite()).float().mean())
            shares = [f"{share:.0%} {word}" for share, word in ((zero, "zero"), (bad, "not finite")) if share]
            parts.append(", ".join([f"{name} in {str(t.dtype).removeprefix('torch.')}", *shares]))
    return "; ".join(parts)


def in_float16(state: Any) -> str:
    """The first tensor among an optimizer's state that is in float16."""
    held = state.items() if isinstance(state, dict) else ()
    return next((str(name) for name, t in held if isinstance(t, torch.Tensor) and t.dtype == torch.float16), "")
