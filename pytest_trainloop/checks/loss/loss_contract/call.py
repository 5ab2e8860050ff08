"""One call of a loss function, and what it breaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.checks.loss.loss_contract.token_labels import Tokens
    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.tracing.provenance import Node

Level = Literal["fault", "advice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A contract that one call breaks. ``always`` tells that only all calls of a place together show it."""

    cause: str
    summary: str
    measured: str = ""
    shown_by: str = ""
    culprit: str = ""
    where: str = ""
    repair: str = ""
    level: Level = "fault"
    always: bool = False


@dataclass(slots=True, kw_only=True)
class Call:
    """A call of a loss function: its arguments by name and where each comes from; ``layer`` is the path of the layer
    with weights that gave its input.

    ``weights`` is the gradient of what is backpropagated with respect to what the call gave, ``arrived`` the gradient
    that came in at its input from all that used it; ``root`` is the value of what is backpropagated.
    """

    name: str
    given: Mapping[str, Any]
    place: Place
    site: Site
    out: torch.Tensor
    module: str = ""
    layer: str | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    tokens: Tokens | None = None
    rows: int = 0
    number: int = 0
    weights: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    root: float | None = None

    def tensor(self, name: str) -> torch.Tensor | None:
        value = self.given.get(name)
        return value.detach() if isinstance(value, torch.Tensor) else None

    def node(self, name: str) -> Node | None:
        return self.nodes.get(name)

    @property
    def reduction(self) -> str:
        return str(self.given.get("reduction", "mean"))

    def counts(self) -> torch.Tensor | None:
        """Of a call that gives one loss for each entry: which of them go into what is backpropagated."""
        if self.weights is None or self.out.dim() == 0 or self.weights.shape != self.out.shape:
            return None
        return self.weights.detach() != 0


def as_list(values: torch.Tensor, most: int = 6) -> str:
    """A few values, for a message."""
    shown = [f"{v:g}" for v in values.flatten()[:most].tolist()]
    return "[" + ", ".join(shown) + (", ...]" if values.numel() > most else "]")
