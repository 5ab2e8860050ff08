"""By which ids a loop tells padding: ``mask = ids != 0``, of ids that an embedding looks up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.batches.values import plain, whole
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.torch_names import EMBEDDINGS, EQUALITIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.runs.evidence import Evidence

MOST_COMPARISONS = 64
"""Comparisons, and look-ups, of one step that are kept."""


class ComparedIds(WatchingMode):
    """The whole numbers that one step compares its ids with, and the ids that embeddings look up."""

    def __init__(self) -> None:
        super().__init__()
        self._compared: list[tuple[torch.Tensor, int]] = []
        self._looked_up: list[torch.Tensor] = []

    @classmethod
    def of(cls, evidence: Evidence) -> tuple[int, ...]:
        """These numbers, smallest first; none where the step cannot be made."""
        seen = cls()
        plan = replace(evidence.plan(), contexts=seen.contexts, enough=lambda record: record.rounds >= 1)
        try:
            evidence.rerun(plan)
        except CannotDecide:
            return ()
        known = seen._looked_up
        found = {v for ids, v in seen._compared if any(ids.shape == i.shape and torch.equal(ids, i) for i in known)}
        return tuple(sorted(found))

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in EMBEDDINGS and len(self._looked_up) < MOST_COMPARISONS:
            self._looked_up += [t.detach().clone() for t in (*args, *kwargs.values()) if _are_ids(t)]
        elif name in EQUALITIES and len(args) == 2 and len(self._compared) < MOST_COMPARISONS:
            ids, value = args if _are_ids(args[0]) else (args[1], args[0])
            if isinstance(value, torch.Tensor) and value.numel() == 1 and whole(value):
                value = int(value)
            if _are_ids(ids) and type(value) is int and value >= 0:
                self._compared.append((ids.detach().clone(), value))
        return super().call(name, func, args, kwargs)


def _are_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and plain(value) and value.dim() > 1 and whole(value)
