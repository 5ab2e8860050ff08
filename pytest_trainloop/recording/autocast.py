"""The autocast block that a call is made in."""

from __future__ import annotations

import torch


def autocast() -> str:
    """Device and dtype of the block, as "cpu:bfloat16"; empty outside of one."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return f"{device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
    return ""
