"""Whether a leaf of the batch is a target: given to a loss function, and no prediction depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_internals import has_values
from pytest_trainloop.recording.torch_names import LOSSES, SIGN_LOSSES
from pytest_trainloop.runs.hooks import before_calls
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import Lineage, name_of, watched
from pytest_trainloop.tracing.provenance_queries import ancestors

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.provenance import Node

WITH_TARGETS = LOSSES - SIGN_LOSSES - {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
"""Losses with a target for each row: others compare rows that are drawn for each other anew."""

STEPS = 2
"""Optimizer steps of the run."""


_FILLS = frozenset({"pad", "masked_fill", "setitem"})
"""Operations that give some entries another value, or add some: the others are those of the first argument."""

MOST_NODES = 20_000
"""Calls before a loss function in which the leaf is looked for."""


class _Uses(WatchingMode):
    """How the values of one leaf are used in a run."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.in_loss = False
        """A loss function is given them as its target."""
        self.in_model = False
        """A module is called with them."""
        self.moved_into_loss = False
        """The same, and the target is known to be made of the leaf by moves alone."""
        self.in_prediction = False
        """What such a loss compares them with is made of them as well."""
        self._lineage = Lineage()
        self._given: list[torch.Tensor] = []

    @property
    def only_a_target(self) -> bool:
        """Whether no prediction depends on them. A model that is called with its labels may hand them on to its loss
        alone: that is seen where the way of the labels is."""
        if self.in_model:
            return self.moved_into_loss and not self.in_prediction
        return self.in_loss or (self.moved_into_loss and not self.in_prediction)

    def take(self, _number: int, item: Any) -> None:
        self._lineage.forget()
        self._given = [leaf for path, leaf in nested.paths(item) if nested.shown(path) == self.path]
        for leaf in self._given:
            self._lineage.adopt(leaf)

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if not type(module).__module__.startswith("torch.nn.modules.loss"):
                self.in_model = self.in_model or self._is_among(nested.tensors((args, kwargs)))

        return (*super().contexts(watch), before_calls(watch, enter))

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in WITH_TARGETS:
            self._compared(tuple(tensors_in(args[:1], kwargs.get("input"))), tuple(tensors_in(args[1:], kwargs)))
        full = name_of(func)
        if not watched(full):
            return super().call(name, func, args, kwargs)
        parents = self._lineage.before(full, args, kwargs)
        out = super().call(name, func, args, kwargs)
        with self.watch.suspended():
            self._lineage.note(self.watch, func, full, args, kwargs, parents, out)
        return out

    def _compared(self, predictions: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
        with self.watch.suspended():
            self.in_loss = self.in_loss or self._is_among(targets)
            if any(_is_moved(self._lineage.of(target)) for target in targets):
                self.moved_into_loss = True
                made_of = (node for given in predictions for node in ancestors(self._lineage.of(given), MOST_NODES))
                self.in_prediction = self.in_prediction or any(node.op == "batch" for node in made_of)

    def _is_among(self, tensors: Iterable[torch.Tensor]) -> bool:
        return any(_same(leaf, tensor) for tensor in tensors for leaf in self._given if has_values(tensor))


def is_target(evidence: Evidence, path: str) -> bool:
    """Whether this leaf is the target of a loss function of torch, as it is, one-hot or moved, and no prediction
    depends on it: what a model is conditioned on is no target."""
    uses = _Uses(path)
    evidence.rerun(
        before_item=uses.take, contexts=uses.contexts, enough=lambda record: record.rounds >= STEPS, may_raise=True
    )
    return uses.only_a_target


def _is_moved(node: Node) -> bool:
    """Whether a tensor holds the leaf's entries, cast, cut, shifted or padded."""
    while node.op != "batch":
        if not (node.moves or node.op in _FILLS) or not node.parents:
            return False
        node = node.parents[0]
    return True


def _same(leaf: torch.Tensor, tensor: torch.Tensor) -> bool:
    values = leaf.detach().cpu().flatten().double()
    other = tensor.detach().cpu()
    if other.dim() > 1 and other.shape[0] == values.numel() < other.numel():
        other = other.flatten(1).argmax(1)
    return other.numel() == values.numel() and bool(torch.equal(other.flatten().double(), values))
