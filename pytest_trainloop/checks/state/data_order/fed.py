"""Whether a leaf of the batch is an input of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.runs.hooks import before_calls

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

STEPS = 2
"""Optimizer steps of the run."""


def fed_to_model(evidence: Evidence, path: str) -> bool:
    """Whether a module is called with the values of this leaf: what a model is conditioned on is no target."""
    given: list[torch.Tensor] = []
    fed: list[bool] = []

    def take(_number: int, item: Any) -> None:
        given[:] = [leaf for name, leaf in nested.paths(item) if nested.shown(name) == path]

    def contexts(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if type(module).__module__.startswith("torch.nn.modules.loss"):
                return
            inputs = [t for t in nested.tensors((args, kwargs)) if not t.is_floating_point()]
            fed.extend(_same(a, b) for a in given for b in inputs)

        return (before_calls(watch, enter),)

    evidence.rerun(before_item=take, contexts=contexts, enough=lambda r: r.rounds >= STEPS, may_raise=True)
    return any(fed)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() == b.numel() and bool(torch.equal(a.detach().cpu().flatten().long(), b.cpu().flatten().long()))
