"""Whether a criterion compares each target with the output of its own position: a causal language model's loss may
shift them inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.strategies.loss_cases import Case, LossInputs, channels, class_axis, inputs_of

if TYPE_CHECKING:
    from pytest_trainloop.instruments.losses.evidence import Loss


def require_aligned(loss: Loss, case: Case) -> None:
    """Raise ``CannotDecide`` where another target changes the gradient at other positions, and not at its own."""
    contract = loss.contract
    if not contract.shape or contract.target not in ("index", "binary"):
        return
    inputs = inputs_of(contract, Case(case.rows, seed=case.seed))
    if inputs.target is None:
        return
    other = inputs.target.clone()
    last = other.view(len(other), -1)[0]
    last[-1] = _other_label(loss, last[-1])
    before, after = loss.float64(inputs).grads[0], loss.float64(LossInputs(inputs.outputs, other)).grads[0]
    if before is None or after is None:
        return
    changed = before != after
    if channels(contract) is not None:
        changed = changed.movedim(class_axis(contract), -1).flatten(1, -2).any(-1)
    changed = changed.flatten(1)
    if bool(changed.any()) and not bool(changed[0, -1]):
        raise CannotDecide(
            "the criterion compares targets with outputs of other positions (shifted inside); give it after the shift"
        )


def _other_label(loss: Loss, label: torch.Tensor) -> torch.Tensor:
    contract = loss.contract
    if contract.target == "binary":
        return torch.where(label == contract.labels[0], contract.labels[1], contract.labels[0])
    others = [c for c in range(contract.num_classes or 2) if c not in (contract.ignore_index, int(label))]
    return label.new_tensor(others[0] if others else int(label))
