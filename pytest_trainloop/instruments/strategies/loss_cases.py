"""Outputs and targets of a loss, as its contract describes them: a case is drawn, and tensors are computed from it.

A case holds its structure (rows, its one special property, the ignored entries) and a seed for the values. It shrinks
by its structure and is described in one line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from pytest_trainloop.declare.losscontract import LossContract

Trait = Literal[
    "ordinary",
    "one_row",
    "one_class",
    "no_partner",
    "tied",
    "zero",
    "right",
    "large",
    "saturated",
    "some_ignored",
    "all_ignored",
]

DESCRIPTIONS: dict[Trait, str] = {
    "ordinary": "ordinary values",
    "one_row": "a single row",
    "one_class": "all targets of one class",
    "no_partner": "a row whose label no other row has",
    "tied": "all entries of the output equal",
    "zero": "an output of zeros",
    "right": "an output that equals its target",
    "large": "entries around 200",
    "saturated": "probabilities that are exactly 0 and 1",
    "some_ignored": "some targets ignored",
    "all_ignored": "all targets ignored",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a loss, as data."""

    rows: int
    trait: Trait = "ordinary"
    """The one special property of the call."""
    ignored: tuple[int, ...] = ()
    """The entries of the flattened target that are ignored."""
    seed: int = 0
    """The seed of the values."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The tensors of one call, in float64: the outputs, and the target (None where the last output is the target)."""

    outputs: tuple[torch.Tensor, ...]
    target: torch.Tensor | None

    def to(self, dtype: torch.dtype) -> LossInputs:
        """The same values rounded to ``dtype``; class indices keep theirs."""
        return LossInputs(
            tuple(o.to(dtype) for o in self.outputs),
            self.target.to(dtype) if self.target is not None and self.target.is_floating_point() else self.target,
        )


def views_of(contract: LossContract) -> int:
    """The number of outputs that one call takes."""
    if contract.views is not None:
        return contract.views
    return 2 if contract.target == "pair" or (contract.expects == "embeddings" and contract.target != "index") else 1


def channels(contract: LossContract) -> int | None:
    """The length of the class axis of the output, None where it has none."""
    return contract.num_outputs if contract.expects == "values" else contract.num_classes


def output_shape(contract: LossContract, rows: int) -> tuple[int, ...]:
    """The shape of an output with that many rows."""
    if contract.expects == "embeddings":
        return (rows, contract.embedding_dim)
    shape = [rows, *contract.shape]
    length = channels(contract)
    if length is not None:
        shape.insert(class_axis(contract), length)
    return tuple(shape)


def class_axis(contract: LossContract) -> int:
    """The class axis of the output, counted from the front."""
    return contract.class_dim % (2 + len(contract.shape))


def target_shape(contract: LossContract, rows: int) -> tuple[int, ...]:
    """The shape of a target with that many rows."""
    if contract.target == "distribution" or (contract.target == "binary" and contract.num_classes is not None):
        return output_shape(contract, rows) if contract.expects != "embeddings" else (rows,)
    return (rows,) if contract.expects == "embeddings" else (rows, *contract.shape)


def traits(contract: LossContract) -> list[Trait]:
    """The special properties that a case of this contract can have, "ordinary" first."""
    found: list[Trait] = ["ordinary", "tied", "large"]
    if contract.min_rows == 1:
        found.insert(1, "one_row")
    if contract.target in ("index", "binary", "distribution"):
        found.append("one_class")
    if contract.expects == "embeddings" and contract.target == "index":
        found.append("no_partner")
    if contract.expects in ("embeddings", "values") and contract.output_range[0] < 0.0 < contract.output_range[1]:
        found.append("zero")
    if contract.expects == "values" and contract.target == "value" and contract.num_outputs is None:
        found.append("right")
    if contract.target == "pair" and contract.expects in ("embeddings", "values") and views_of(contract) == 2:
        found.append("right")
    if contract.expects == "probabilities":
        found.append("saturated")
    if contract.ignore_index is not None:
        found += ["some_ignored", "all_ignored"]
    return found


def inputs_of(contract: LossContract, case: Case) -> LossInputs:
    """The tensors of a case: float64, or int64 for class indices."""
    generator = torch.Generator().manual_seed(case.seed)
    target = _target(contract, case, generator)
    outputs = tuple(_output(contract, case, generator) for _ in range(views_of(contract)))
    if case.trait == "right" and target is not None:
        outputs = (target.clone(),) * len(outputs)
    elif case.trait == "right":
        outputs = (outputs[0],) * len(outputs)
    if target is not None and contract.ignore_index is not None and case.ignored:
        target.view(-1)[torch.tensor(case.ignored)] = contract.ignore_index
    return LossInputs(outputs, target)


def _output(contract: LossContract, case: Case, generator: torch.Generator) -> torch.Tensor:
    shape = output_shape(contract, case.rows)
    free = 2.0 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.trait == "tied":
        free = free[:1].expand(shape).clone() if contract.expects == "embeddings" else torch.full_like(free, 0.5)
    elif case.trait == "zero":
        free = torch.zeros_like(free)
    elif case.trait in ("large", "saturated") and contract.expects not in ("values", "embeddings"):
        free = 100.0 * free
    elif case.trait == "large" and contract.expects == "embeddings":
        free = 50.0 * free
    elif case.trait == "large":
        free = (4.0 * free).clamp(-10.0, 10.0)
    return _as_expected(contract, case, free)


def _as_expected(contract: LossContract, case: Case, free: torch.Tensor) -> torch.Tensor:
    if contract.expects == "log_probabilities":
        return free.log_softmax(class_axis(contract))
    if contract.expects == "probabilities":
        over_classes = contract.target != "binary"
        found = free.softmax(class_axis(contract)) if over_classes else free.sigmoid()
        return found.round() if case.trait == "saturated" else found
    return within(free, contract.output_range)


def within(free: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    """Unbounded values mapped smoothly between two bounds, either of which may be infinite."""
    low, high = bounds
    if math.isfinite(low) and math.isfinite(high):
        return low + (high - low) * free.sigmoid()
    if math.isfinite(low):
        return low + torch.nn.functional.softplus(free)
    return high - torch.nn.functional.softplus(free) if math.isfinite(high) else free


def _target(contract: LossContract, case: Case, generator: torch.Generator) -> torch.Tensor | None:
    shape = target_shape(contract, case.rows)
    if contract.target == "pair":
        return None
    if contract.target == "index":
        return _indices(contract, case, shape, generator)
    if contract.target == "binary":
        high = torch.randint(2, shape, generator=generator).bool()
        if case.trait == "one_class":
            high = high.view(-1)[:1].expand(shape)
        elif high.numel() > 1:
            high.view(-1)[:2] = torch.tensor([False, True])
        return torch.where(high, contract.labels[1], contract.labels[0]).to(torch.float64)
    free = 2.0 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if contract.target == "distribution":
        axis = class_axis(contract)
        found = free.softmax(axis)
        largest = found == found.amax(axis, keepdim=True)
        return largest.to(torch.float64) if case.trait == "one_class" else found
    return within(free, contract.target_range)


def _indices(contract: LossContract, case: Case, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    classes = torch.tensor([c for c in range(contract.num_classes or 2) if c != contract.ignore_index])
    drawn = classes[torch.randint(len(classes), shape, generator=generator)]
    flat = drawn.view(-1)
    if case.trait == "one_class":
        return flat[:1].expand(shape).clone()
    if contract.expects == "embeddings":
        flat = classes[(torch.arange(len(flat)) // 2) % len(classes)]  # every row has a partner
        if len(flat) % 2 or case.trait == "no_partner":
            flat[-1] = flat[0]
        if case.trait == "no_partner":
            flat[flat == classes[-1]] = classes[0]
            flat[-1] = classes[-1]
        return flat
    if len(flat) > 1 and len(classes) > 1:
        flat[:2] = classes[torch.randperm(len(classes), generator=generator)[:2]]
    return drawn


def described(contract: LossContract, case: Case) -> str:
    """The case in one line, as a failure shows it."""
    inputs = inputs_of(contract, case)
    parts = [f"{case.rows} row{'s' if case.rows > 1 else ''}"]
    if contract.num_classes is not None:
        parts.append(f"{contract.num_classes} classes")
    if inputs.target is not None:
        entries = inputs.target.tolist() if not inputs.target.is_floating_point() else _rounded(inputs.target)
        parts.append(f"target {entries}")
    elif inputs.outputs:
        parts.append(f"outputs of {tuple(inputs.outputs[0].shape)}")
    if case.trait != "ordinary":
        parts.append(DESCRIPTIONS[case.trait])
    return ", ".join([*parts, f"values of seed {case.seed}"])


def _rounded(tensor: torch.Tensor) -> object:
    return tensor.to(torch.float32).mul(100).round().div(100).to(torch.float64).mul(100).round().div(100).tolist()
