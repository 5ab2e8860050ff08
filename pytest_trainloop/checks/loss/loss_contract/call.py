"""One call of a loss function, and what judges it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.finding import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.checks.loss.loss_contract.tokens import Embedded, Tokens
    from pytest_trainloop.losses.table.lookup import Known
    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.tracing.provenance import Node


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is wrong with one call."""

    finding: Finding
    in_every_call: bool = False
    """Whether it counts only where it is found in every call from the same line."""


class Compared(NamedTuple):
    """The two sides of a distance; the model's is held by its identity alone."""

    output: int
    target: torch.Tensor
    place: Place


class PairTable(NamedTuple):
    """A difference of each row of the output with each of the data, and the gradient of the loop's loss there."""

    target: torch.Tensor
    weights: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Call:
    """A call of a loss function, or of an operation that losses are written with."""

    name: str
    given: Mapping[str, Any]
    """The arguments by name."""
    place: Place
    site: Site
    out: torch.Tensor
    """What the call returned."""
    module: str = ""
    """The path of the module whose forward made the call."""
    layer: str | None = None
    """The path of the layer with weights that gave the input."""
    nodes: dict[str, Node] = field(default_factory=dict)
    """What each tensor argument was computed by."""
    tokens: Tokens | None = None
    embedded: tuple[Embedded, ...] = ()
    """What embeddings had looked up before it, since the last step."""
    rows: int = 0
    """Rows of the current batch."""
    number: int = 0
    """How many calls from the same line were judged before."""
    steps: int = 0
    """How many optimizer steps were made before."""
    weights: torch.Tensor | None = None
    """The gradient of the loop's loss with respect to ``out``."""
    arrived: torch.Tensor | None = None
    """The gradient of the loop's loss with respect to the input, from all uses of it."""
    root: float | None = None
    """The value of the loop's loss, which is backpropagated."""
    known: Known | None = None
    """What the table of losses knows of the function, where it is no function of torch."""
    compared: list[Compared] = field(default_factory=list)
    """What a distance compares in this step, where both sides may be boxes."""
    unstepped: tuple[str, ...] = ()
    """Weights of the criterion itself that no step has changed since it was first called, three steps ago at least."""
    with_itself: set[int] = field(default_factory=set)
    """Tensors of this step, by identity, of which all pairs of rows are compared with one another too."""
    pair_tables: list[PairTable] = field(default_factory=list)
    """The differences of this step that compare every row with every other, as far as they were judged."""
    log_probs: list[Node] = field(default_factory=list)
    """The results of ``log_prob`` in this step."""
    beside: list[Call] = field(default_factory=list)
    """The calls of the same distribution in this step, this one included."""

    def tensor(self, name: str) -> torch.Tensor | None:
        value = self.given.get(name)
        return value.detach() if isinstance(value, torch.Tensor) else None

    def node(self, name: str) -> Node | None:
        return self.nodes.get(name)

    @property
    def reduction(self) -> str:
        return str(self.given.get("reduction", "mean"))

    def counted(self) -> torch.Tensor | None:
        """With one loss for each entry: which of them the loop's loss depends on."""
        if self.weights is None or self.out.dim() == 0 or self.weights.shape != self.out.shape:
            return None
        return self.weights.detach() != 0

    def judged(
        self,
        cause: str,
        summary: str,
        *,
        shown_by: str,
        measured: str = "",
        culprit: str = "",
        source: Node | None = None,
        repair: str = "",
        do_not: str = "",
        change: Place | None = None,
        level: Level = "fault",
        in_every_call: bool = False,
    ) -> Judgement:
        """A judgement of this call. ``culprit`` is the function by default; ``source`` is the operation whose line is
        shown in place of the call's; ``change`` is the line that the repair goes to, where that is another."""
        finding = Finding(
            cause=cause,
            level=level,
            summary=summary,
            measured=measured,
            shown_by=shown_by,
            culprits=(culprit or self.name,),
            where=str((source and source.place) or self.place),
            repair=repair,
            do_not=do_not,
            change=str(change or ""),
        )
        return Judgement(finding, in_every_call)


Judge = Callable[[Call], Iterator[Judgement]]

JUDGES: dict[str, list[Judge]] = {}
"""What judges the calls of a function, by its name; ``judges`` fills it."""


def judges(*names: str) -> Callable[[Judge], Judge]:
    """Let a function judge every call of the functions with these names.

    They are loss functions of ``torch.nn.functional``, or operations that losses are written with, named as in
    ``operations.operation``.
    """

    def register(judge: Judge) -> Judge:
        for name in names:
            JUDGES.setdefault(name, []).append(judge)
        return judge

    return register


def in_module(source: Node) -> str:
    """An operation with its module, for a message."""
    return f"{source.op} in {source.module}" if source.module else source.op


def at_line(source: Node) -> str:
    """The line of an operation, to be appended to a message."""
    return f"; {source.op} at {source.place.file}:{source.place.line}" if source.place else ""


def as_list(values: torch.Tensor, most: int = 6) -> str:
    """A few values, for a message."""
    shown = [f"{v:g}" for v in values.flatten()[:most].tolist()]
    return "[" + ", ".join(shown) + (", ...]" if values.numel() > most else "]")
