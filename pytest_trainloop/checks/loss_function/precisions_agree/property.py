"""Does the value in single and half precision agree with float64, as far as rounding explains?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.losses.calls import Answer, Caller, Refused
from pytest_trainloop.losses.search import Seen
from pytest_trainloop.recording.torch_internals import DispatchMode, tree_leaves
from pytest_trainloop.recording.torch_names import ATEN_DRAWS
from pytest_trainloop.strategies.loss_cases import Inputs, inputs_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_trainloop.losses.evidence import Loss
    from pytest_trainloop.strategies.loss_cases import Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PERTURBED = 3

KERNEL = 8
"""Roundings in one kernel: the longest of torch's fused losses (a weighted binary cross-entropy: exp, log1p, a maximum,
three products, two sums) makes eight in a row; a function of the math library is right to within two."""


class Magnitudes(DispatchMode):  # type: ignore[no-untyped-call]
    """How many roundings lie on the way to the result, at most, and the largest number on it.

    A kernel that makes an entry of entries has ``KERNEL`` of them, and one that adds entries up one for each that goes
    into one of its results.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False
        self.roundings = 0
        self.largest = 1.0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.drew = self.drew or any(word in str(func) for word in ATEN_DRAWS)
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
        given = [t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in made[:1]:
            self.roundings += KERNEL + math.ceil(max(given, default=0) / tensor.numel())
        for tensor in made:
            self.largest = max(self.largest, float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()))
        return out


def look(loss: Loss, case: Case) -> Seen | None:
    """The first precision in which the value is further from float64 than rounding explains."""
    exact = inputs_of(loss.contract, case)
    if loss.wide(exact, grad=False).total != loss.wide(exact, grad=False, seed=1).total:
        raise CannotDecide("the criterion draws random numbers, which are others in each precision")
    refused: Refused | None = None
    judged = False
    for dtype in DTYPES:
        try:
            seen = _in(loss, exact.to(dtype), dtype)
        except Refused as error:
            refused = error
            continue
        judged = True
        if seen is not None:
            return seen
    if not judged:
        raise refused or CannotDecide("no precision could be judged")
    return None


def _in(loss: Loss, inputs: Inputs, dtype: torch.dtype) -> Seen | None:
    name = str(dtype).removeprefix("torch.")
    answer = Caller(loss.contract, loss.own.seed, dtype=dtype)(inputs)
    double = inputs.to(torch.float64)
    sizes, backward = Magnitudes(), Magnitudes()
    reference = loss.wide(double, inside=sizes, behind=backward)
    if sizes.drew:
        raise CannotDecide("the criterion draws numbers, under a seed of its own, which are others in each precision")
    if not reference.finite or _largest(reference) > torch.finfo(dtype).max:
        return None
    if not answer.finite:
        in_value = not math.isfinite(answer.total)
        return _not_finite(answer, reference, dtype, sizes.largest if in_value else backward.largest)
    error = abs(answer.total - reference.total)
    unit = torch.finfo(dtype).eps / 2
    if error <= sizes.roundings * unit * sizes.largest:
        return None
    moved = _moved(loss, double, reference, unit)
    bound = sizes.roundings * (unit * sizes.largest + moved)
    if error <= bound:
        return None
    return Seen(
        cause="loses_digits",
        summary=f"the value in {name} is off by {error:.3g}, {error / bound:.3g} times what rounding explains",
        measured=f"{answer.total:.6g}, {reference.total:.6g} in float64 of the same numbers; bound {bound:.3g}",
        shown_by=(
            f"{sizes.roundings} roundings of numbers up to {sizes.largest:.3g}, and {moved:.3g} for outputs "
            f"that differ in the last digit"
        ),
    )


def _not_finite(answer: Answer, reference: Answer, dtype: torch.dtype, largest: float) -> Seen:
    """A number on the way that is too large for the precision, or rounds to one that is, may be beyond every way to
    compute this loss."""
    name, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    place = "the gradient" if math.isfinite(answer.total) else "the value"
    return Seen(
        cause="not_finite" if largest <= most / 2 else "out_of_range",
        summary=f"{place} is not finite in {name}",
        measured=f"{answer.total:.4g} in {name}, {reference.total:.6g} in float64 for the same numbers",
        shown_by=f"the result can be represented in {name} (up to {most:.3g}); "
        f"the largest number on the way to it is {largest:.3g} in float64",
    )


def _largest(answer: Answer) -> float:
    entries = [float(answer.value.abs().max()), abs(answer.total)]
    return max([*entries, *(float(g.abs().max()) for g in answer.grads if g is not None and g.numel())])


def _moved(loss: Loss, inputs: Inputs, reference: Answer, unit: float) -> float:
    """What the value changes by when every number of the call is rounded once more."""
    largest = 0.0
    for number in range(PERTURBED):
        generator = torch.Generator().manual_seed(number)

        def rounded(tensor: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            sign = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
            return tensor * (1.0 + unit * sign)

        total = loss.wide(Inputs(tuple(map(rounded, inputs.outputs)), inputs.target), grad=False).total
        largest = max(largest, abs(total - reference.total))
    return largest if math.isfinite(largest) else 0.0
