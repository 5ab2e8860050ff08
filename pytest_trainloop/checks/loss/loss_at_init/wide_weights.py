"""Which weights make a first loss too high: those that are drawn wider than torch draws a layer, shown by a run in
which they have that width.

``nn.Linear`` and convolutions are drawn uniformly within 1 / sqrt(fan_in), with a standard deviation of
1 / sqrt(3 fan_in), where fan_in is the number of inputs that one output sums up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLosses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLoss
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

    Losses = Callable[[Callable[[Watch], None]], list[InitialLoss]]
    """The losses before the first step of a run that is prepared so."""

WIDE = math.sqrt(6)
"""Times torch's own standard deviation up to which a usual initialisation draws: that of He for ReLU is the widest."""

MOST = 3
"""Weights that are tried one by one, the widest first."""


class Width(NamedTuple):
    """The standard deviation of a weight, and what torch would have drawn."""

    name: str
    std: float
    usual: float

    @property
    def times(self) -> float:
        return self.std / self.usual


class WideWeights:
    """The weights that are drawn too wide, and the losses in runs with the usual width."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def causing(
        self, loss: InitialLoss, most: float, losses: Losses | None = None
    ) -> tuple[tuple[Width, ...], InitialLoss] | None:
        """One weight, or else all that are too wide, with the loss that is at most ``most`` times chance once they have
        the usual width; None where they are not the cause. ``losses`` measures other losses than calls of torch's."""
        widths: list[Width] = []
        measured = losses or self._losses
        measured(lambda watch: widths.extend(_widths(watch)))
        wide = sorted((w for w in widths if w.times > WIDE), key=lambda w: -w.times)
        tried: list[Sequence[Width]] = [[w] for w in wide[:MOST]]
        for chosen in [*tried, wide] if len(wide) > 1 else tried:
            found = measured(_narrowed({w.name: 1 / w.times for w in chosen}))
            same = next((other for other in found if other.where == loss.where), None)
            if same is not None and same.times <= most:
                return tuple(chosen), same
        return None

    def _losses(self, prepare: Callable[[Watch], None]) -> list[InitialLoss]:
        found = InitialLosses()
        self._evidence.rerun(contexts=found.contexts, enough=lambda r: r.begun, prepare=prepare)
        return found.recorded


def _widths(watch: Watch) -> list[Width]:
    tables = {id(m.weight) for _, m in watch.table.named_modules() if isinstance(m, nn.Embedding)}
    found = []
    for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
        drawn = tensor.dim() > 1 and tensor.is_floating_point() and not nn.parameter.is_lazy(tensor)
        if drawn and id(tensor) not in tables and tensor.numel() > 1:
            inputs = tensor.numel() // tensor.shape[0] if entry.layer else max(tensor.shape)
            std = float(tensor.detach().double().square().mean().sqrt())
            found.append(Width(entry.name, std, 1 / math.sqrt(3 * inputs)))
    return found


def _narrowed(factors: dict[str, float]) -> Callable[[Watch], None]:
    def prepare(watch: Watch) -> None:
        with torch.no_grad():
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                if entry.name in factors:
                    tensor.mul_(factors[entry.name])

    return prepare
