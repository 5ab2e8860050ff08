"""One call of a loss function: what it was given, what its arguments were made of, and the findings at it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.checks.loss.loss_contract.causes import CAUSES, IN_EVERY_CALL, found
from pytest_trainloop.instruments.tracing.data_lines import name_in_batch
from pytest_trainloop.instruments.tracing.definitions import argument
from pytest_trainloop.instruments.tracing.statements import by_caller
from pytest_trainloop.instruments.tracing.tape_queries import statement, unmoved
from pytest_trainloop.recording.torch_names import LOSSES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.instruments.losses.table.lookup import Known
    from pytest_trainloop.instruments.tracing.tape import Value
    from pytest_trainloop.recording.events import Place, Site

WAITING_STEPS = 3
"""Optimizer steps for which a call waits for its backward pass, and after which a criterion's weights have moved."""


class Embedded(NamedTuple):
    """Ids (rows, positions), or of one row (positions,), that an embedding looked up."""

    ids: torch.Tensor
    pad: int | None
    out: torch.Tensor
    table: str
    """The path of the embedding."""
    entries: int = 0
    """How many ids it has."""


@dataclass(slots=True)
class Step:
    """What is known between two optimizer steps."""

    declared: Padding | None = None
    batch: Any = None
    rows: int = 0
    embedded: list[Embedded] = field(default_factory=list)
    calls: list[LossCall] = field(default_factory=list)
    """Earlier calls that others are compared with."""


@dataclass(slots=True, kw_only=True, eq=False)
class LossCall:
    """``given`` has the arguments by name and ``values`` what the tensors among them were made of; ``weights`` is the
    gradient of what is backpropagated (``root``) at the result, ``arrived`` that at the input from all its uses."""

    name: str
    takes: Mapping[str, str]
    given: dict[str, Any]
    values: dict[str, Value]
    place: Place
    site: Site
    step: Step
    module: str
    class_dim: int = 1
    known: Known | None = None
    embedded: tuple[Embedded, ...] = ()
    steps: int = 0
    """Optimizer steps before it."""
    unstepped: tuple[str, ...] = ()
    layer: str | None = None
    evaluates: bool = False
    """Whether the layer that gave the scores is in evaluation mode."""
    out: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    made: Value | None = None
    weights: torch.Tensor | None = None
    arrived: torch.Tensor | None = None
    root: float | None = None
    number: int = 0
    error: Exception | None = None
    every: set[tuple[str, str]] = field(default_factory=set)
    """Causes and culprits that count only where every call shows them."""

    def tensor(self, name: str) -> torch.Tensor | None:
        value = self.given.get(name)
        return value.detach() if isinstance(value, torch.Tensor) else None

    @property
    def raised(self) -> str:
        """What torch said as it refused the call."""
        return str(self.error).strip().partition("\n")[0][:160]

    @property
    def of_torch(self) -> bool:
        return self.known is None and self.name in LOSSES

    @property
    def over_classes(self) -> bool:
        return bool({"index", "one_hot", "distribution", "class_logits"} & {*self.takes.values()})

    def counted(self, like: torch.Tensor) -> torch.Tensor:
        """Which entries the loop's loss depends on, where the call has one loss for each; all where it has not."""
        each = self.weights is not None and self.out.dim() and self.weights.shape == self.out.shape == like.shape
        kept = self.weights.detach() != 0 if each and self.weights is not None else torch.ones_like(like).bool()
        weight = self.tensor("weight")
        if self.name.startswith("binary") and weight is not None and weight.numel() == like.numel():
            kept = kept & (weight.reshape(like.shape) != 0)
        return kept

    @property
    def one_each(self) -> bool:
        return self.weights is not None and self.out.dim() > 0 and self.weights.shape == self.out.shape

    @property
    def alone(self) -> bool:
        """Whether this call, weighted, is all of what is backpropagated."""
        if self.weights is None or self.root is None or self.weights.shape != self.out.shape:
            return False
        total = float((self.weights.detach().double() * self.out.detach().double()).sum())
        return abs(total - self.root) <= 1e-4 * abs(self.root)

    def finds(self, cause: str, variant: str = "", /, **given: Any) -> Finding:
        """A finding at this call, or at the line of its ``source``, a value.

        ``culprit``, ``level``, ``repair``, ``change`` and ``shown_by`` are its fields; ``every`` says that it counts
        only where all calls from the same line show it; all others are facts of its texts.
        """
        source, every = given.pop("source", None), given.pop("every", False)
        culprit, place = given.pop("culprit", ""), self.place
        if source is not None:
            place, culprit = source.call.place, culprit or named(source)
        culprit = culprit or self.name
        if every or (cause in IN_EVERY_CALL and self.name != "ctc_loss"):
            self.every.add((cause, culprit))
        change = by_caller(self.site, self.name) if cause in ("broadcast", "box_format") else ""
        if cause in ("mean_over_elements", "signs_expected"):
            change = by_caller(self.site, self.name, "reduction" if cause == "mean_over_elements" else "target")
        elif self.name == "ctc_loss" and cause.endswith("_as_log_probabilities"):
            change = argument(str(place), self.name, "log_probs", 0)
        given["change"] = str(given.get("change") or change)
        if not given.get("repair"):
            given.pop("repair", None)  # that of the cause
        facts = self.facts() | {"source": culprit} | given
        facts = {n: str(v) if isinstance(v, tuple) else v for n, v in facts.items()}
        made = found(cause, place, (culprit,), variant, **facts)
        if "data" in CAUSES[cause].change and not made.change and source is None:
            made = self._made_by_target(made)
        if source is not None:
            made = replace(made, shown_by=f"{made.shown_by}; {source.op} at {place.file}:{place.line}")
        return made if made.measured else replace(made, measured=facts["numbers"])

    def _made_by_target(self, finding: Finding) -> Finding:
        """The finding with the statement that computed the target, or with the tensor of the batch that it is."""
        value = unmoved(next((self.values[name] for name in ("target", "targets") if name in self.values), None))
        if line := statement(value):
            return replace(finding, change=line)
        names = [name_in_batch(value.path)] if value is not None and value.path else []
        return replace(finding, culprits=(*finding.culprits, *names))

    def facts(self) -> dict[str, Any]:
        """What the texts of every finding may name (``causes.OF_EVERY_CALL``)."""
        tensors = {n: v for n, v in self.given.items() if isinstance(v, torch.Tensor)}
        scores, loss = tensors.get("input"), "" if self.error else f"{float(self.out.detach().double().mean()):.4g}"
        shown = [f"{n} in {bounds(tensors[n])}" for n in ("input", "log_probs", "target", "var") if n in tensors]
        numbers = "; ".join([*shown[:2], f"{self.name} {loss}"])
        if self.error is not None:
            numbers = ", ".join(f"{n} {tuple(v.shape)} {dtype(v)}" for n, v in tensors.items())
        when = self.known.contract.when if self.known is not None else {}
        flags = [f"{n}={v!r}" for n, v in when.items() if isinstance(v, (bool, int, str)) or v is None]
        return {
            "call": self.name,
            "input": bounds(tensors["input"]) if "input" in tensors else "",
            "var": bounds(tensors["var"]) if "var" in tensors else "",
            "shape": () if scores is None else tuple(scores.shape),
            "loss": loss,
            "error": self.raised,
            "flags": f"{self.name} has {', '.join(flags)}; " if flags else "",
            "numbers": numbers,
        }


def named(value: Value) -> str:
    """An operation with its module, for a message."""
    module = value.call.module if value.call is not None else ""
    return f"{value.op} in {module}" if module else value.op


def dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def bounds(tensor: torch.Tensor) -> str:
    wide = tensor.detach().double()
    return f"[{float(wide.min()):.4g}, {float(wide.max()):.4g}]" if wide.numel() else "[]"


def listed(values: Any, most: int = 6) -> str:
    values = torch.as_tensor(values, dtype=torch.float64).flatten()
    return f"[{', '.join(f'{v:g}' for v in values[:most].tolist())}{', ...' if len(values) > most else ''}]"


def both_grow(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that two are broadcast to, if it is larger than each of them."""
    out, sizes = broadcast_to(left, right), (math.prod(left), math.prod(right))
    return out if out is not None and min(sizes) > 1 and math.prod(out) > max(sizes) else None


def column_against_table(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one of them has one number for each row, with a history, and the other several, without."""
    if one.dim() != 2 or other.dim() != 2 or len(one) != len(other) or len(one) < 2:
        return False
    column, table = (one, other) if one.requires_grad else (other, one)
    return column.requires_grad and not table.requires_grad and column.shape[1] == 1 < table.shape[1]


def broadcast_to(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that two are broadcast to; None where they do not fit."""
    try:
        return tuple(torch.broadcast_shapes(left, right))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
