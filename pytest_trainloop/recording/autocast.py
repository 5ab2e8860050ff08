"""The autocast block that a call is made in."""

from __future__ import annotations

import torch


def autocast() -> str:
    """Device and dtype of the block, as "cpu:bfloat16"; empty outside of one."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return f"{device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
    return ""


def open_blocks() -> int:
    """How many ``with torch.autocast(...)`` blocks are open. Casts of weights are kept until the last is left."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def leave_open(count: int) -> None:
    """Leave blocks that were entered by hand and never left, until so many are open; or enter those that were left."""
    depth = open_blocks()
    if depth == count:
        return
    change = torch.autocast_increment_nesting if depth < count else torch.autocast_decrement_nesting
    for _ in range(abs(depth - count)):
        change()
    torch.clear_autocast_cache()
