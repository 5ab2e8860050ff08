"""Refuse labels of a CTC loss that are no classes, in runs over data that a check has made.

On CPUs torch looks labels up in the scores without a check of their range: one of -1, as padding often is, makes the
backward pass write outside of its memory, and the process ends.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.whose import of_the_project

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def ctc_labels_checked() -> Iterator[None]:
    """Raise ``IndexError`` where a CTC loss is given a label that is no class, as ``cross_entropy`` does."""
    original = torch.ctc_loss

    @functools.wraps(original)
    def checked(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any, **named: Any) -> Any:
        _require_classes(targets, torch.as_tensor(target_lengths).flatten().tolist(), log_probs.shape[-1])
        return original(log_probs, targets, input_lengths, target_lengths, *rest, **named)

    torch.ctc_loss = checked
    try:
        yield
    finally:
        torch.ctc_loss = original


def _require_classes(targets: torch.Tensor, lengths: list[int], classes: int) -> None:
    counted = (
        [targets[: sum(lengths)]] if targets.dim() == 1 else [t[:n] for t, n in zip(targets, lengths, strict=False)]
    )
    for labels in counted:
        outside = labels[(labels < 0) | (labels >= classes)]
        if len(outside):
            raise of_the_project(IndexError(f"Target {int(outside[0])} is out of bounds."))
