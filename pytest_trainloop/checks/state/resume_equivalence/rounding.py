"""Weights that come back from a checkpoint in a lower precision than they were in.

A run in float64 does not show it: what is cast to a lower precision stays in float64 there. So a loop in its own
precision is saved before it trains, and loaded into another one. Values that differ, and are those of the first loop
rounded to a lower dtype bit for bit, were rounded on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.state.resume_equivalence.checkpoint import Checkpoint
from pytest_trainloop.checks.state.resume_equivalence.names import declared_tensors
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.whose import reraise_ours

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence

_LOWER = (torch.float16, torch.bfloat16, torch.float32)


def rounded(evidence: Evidence) -> tuple[str, tuple[str, ...]] | None:
    """The dtype and the names of what is rounded to it; None where nothing is, or a loop that has not trained yet can
    be saved or loaded by no means."""
    first, second = evidence.fresh_loop(), evidence.fresh_loop()
    checkpoint = Checkpoint()
    try:
        with preserved():
            checkpoint.take(first)
            saved = {name: tensor.detach().clone() for name, tensor in declared_tensors(first)}
            checkpoint.give(second)
    except (Exception, SystemExit) as error:  # of the project's save and load
        reraise_ours(error)
        return None
    finally:
        checkpoint.remove()
    loaded = dict(declared_tensors(second))
    for dtype in _LOWER:
        names = tuple(name for name, value in saved.items() if _is_rounded(value, loaded.get(name), dtype))
        if names:
            return str(dtype).removeprefix("torch."), names
    return None


def _is_rounded(value: torch.Tensor, loaded: torch.Tensor | None, dtype: torch.dtype) -> bool:
    if loaded is None or not value.is_floating_point() or value.layout is not torch.strided or value.is_meta:
        return False
    if loaded.shape != value.shape or loaded.dtype != value.dtype or torch.equal(loaded, value):
        return False
    return torch.equal(loaded.detach().to(value.device), value.to(dtype).to(value.dtype))
