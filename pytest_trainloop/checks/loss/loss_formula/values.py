"""A value of a slice in the loop around it: who is behind it, what trains it otherwise, what training it comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.formulas.cut import slope
from pytest_trainloop.instruments.formulas.trial import tried
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.core.finding import Level
    from pytest_trainloop.instruments.formulas.trial import Aim, Step
    from pytest_trainloop.instruments.tracing.loss_slice import Slice
    from pytest_trainloop.runs.evidence import Evidence


def trained(
    step: Step,
    arguments: Sequence[int],
    number: int,
    aim: Aim | None,
    *more: Any,
    level: Level = "fault",
    otherwise: Level | None = None,
    shifted: bool = False,
) -> tuple[Level | None, str]:
    """Whether what is recognised is a fault, advice or nothing, by what training the outputs comes to, and that in
    words. Where nothing can be tried it is advice, without words."""
    outcome = None if aim is None else tried(step, arguments, number, aim, *more, shifted=shifted)
    if outcome is None:
        return "advice", ""
    return (level if outcome.confirmed else otherwise), outcome.text


def culprits_of(part: Slice, numbers: Sequence[int]) -> tuple[str, ...]:
    """The layers that gave values, and the tensors of the batch behind them."""
    names = [name for n in numbers if (name := layer_of(part, n))]
    leaves = [nested.shown(v.path) for n in numbers for v in part.from_batch(n) if v.path is not None]
    return tuple(dict.fromkeys((*names, *leaves)))


def layer_of(part: Slice, number: int) -> str:
    """The module whose weights gave a value."""
    layers = [v for v in part.trained(number) if v.parameters]
    names = [name for v in layers[:1] for name in v.parameters]
    return names[0].rpartition(".")[0] if names else ""


def slope_of(part: Slice, number: int) -> torch.Tensor | None:
    """The gradient of what is backpropagated at each entry of a value; None where there is none, or the calls between
    cannot be made again."""
    leaf = part.values[number].tensor.clone().requires_grad_()
    try:
        (root,) = part.replay({number: leaf}, [part.root])
    except CannotReplay:
        return None
    return slope(root, (leaf,))


def others_train(part: Slice, number: int) -> bool:
    """Whether what is backpropagated trains a layer otherwise than by way of a value, or may do so."""
    layers = {v.number: v.tensor.clone().requires_grad_() for v in part.trained(part.root)}
    try:
        (root,) = part.replay({**layers, number: part.values[number].tensor}, [part.root])
    except CannotReplay:
        return True
    if not root.requires_grad:
        return False
    gradients = torch.autograd.grad(root.sum(), list(layers.values()), allow_unused=True)
    return any(g is not None and bool((g != 0).any()) for g in gradients)


def plays_a_game(part: Slice, number: int, evidence: Evidence) -> bool:
    """Whether an optimizer maximises, or none holds the layers that gave the prediction."""
    record = evidence.run()
    held = {record.parameters[i].name for i in record.held}
    holds = any(name in held for v in part.trained(number) for name in v.parameters)
    return not holds or any(o.maximizes for o in record.optimizers)
