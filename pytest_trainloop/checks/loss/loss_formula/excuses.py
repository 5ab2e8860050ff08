"""What excuses a loss: something else trains the prediction, or making it worse is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.tracing.loss_slice import CannotReplay

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.loss_slice import Slice


def others_train(found: Slice, number: int) -> bool:
    """Whether what is backpropagated trains a layer otherwise than by way of a value, or may do so."""
    layers = {v.number: v.tensor.clone().requires_grad_() for v in found.trained(found.root)}
    try:
        (root,) = found.replay({**layers, number: found.values[number].tensor}, [found.root])
    except CannotReplay:
        return True
    if not root.requires_grad:
        return False
    gradients = torch.autograd.grad(root.sum(), list(layers.values()), allow_unused=True)
    return any(g is not None and bool((g != 0).any()) for g in gradients)


def plays_a_game(found: Slice, number: int, evidence: Evidence) -> bool:
    """Whether an optimizer maximises, or none holds the layers that gave the prediction."""
    record = evidence.run()
    held = {record.parameters[i].name for i in record.held}
    holds = any(name in held for v in found.trained(number) for name in v.parameters)
    return not holds or any(o.maximizes for o in record.optimizers)
