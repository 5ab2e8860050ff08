"""Whether a leaf of the batch is a target: given to a loss function, and to no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_internals import has_values
from pytest_trainloop.recording.torch_names import LOSSES, SIGN_LOSSES
from pytest_trainloop.runs.hooks import before_calls
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

WITH_TARGETS = LOSSES - SIGN_LOSSES - {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
"""Losses with a target for each row: others compare rows that are drawn for each other anew."""

STEPS = 2
"""Optimizer steps of the run."""


class _Uses(WatchingMode):
    """How the values of one leaf are used in a run."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.in_loss = False
        self.in_model = False
        self._given: list[torch.Tensor] = []

    def take(self, _number: int, item: Any) -> None:
        self._given = [leaf for path, leaf in nested.paths(item) if nested.shown(path) == self.path]

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if not type(module).__module__.startswith("torch.nn.modules.loss"):
                self.in_model = self.in_model or self._is_among(nested.tensors((args, kwargs)))

        return (*super().contexts(watch), before_calls(watch, enter))

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in WITH_TARGETS and not self.in_loss:
            self.in_loss = self._is_among(tensors_in(args[1:], *kwargs.values()))
        return super().call(name, func, args, kwargs)

    def _is_among(self, tensors: Iterable[torch.Tensor]) -> bool:
        return any(_same(leaf, tensor) for tensor in tensors for leaf in self._given if has_values(tensor))


def is_target(evidence: Evidence, path: str) -> bool:
    """Whether the values of this leaf are the target of a loss function of torch, as they are or one-hot, and no module
    is called with them: what a model is conditioned on is no target."""
    uses = _Uses(path)
    evidence.rerun(
        before_item=uses.take, contexts=uses.contexts, enough=lambda record: record.rounds >= STEPS, may_raise=True
    )
    return uses.in_loss and not uses.in_model


def _same(leaf: torch.Tensor, tensor: torch.Tensor) -> bool:
    values = leaf.detach().cpu().flatten().double()
    other = tensor.detach().cpu()
    if other.dim() > 1 and other.shape[0] == values.numel() < other.numel():
        other = other.flatten(1).argmax(1)
    return other.numel() == values.numel() and bool(torch.equal(other.flatten().double(), values))
