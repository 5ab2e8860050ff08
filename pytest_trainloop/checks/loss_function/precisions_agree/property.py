"""Whether the value in single and half precision agrees with float64, as far as rounding explains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.instruments.losses.calls import Caller, CallResult, CriterionRaised
from pytest_trainloop.instruments.strategies.loss_cases import LossInputs, inputs_of
from pytest_trainloop.instruments.tracing.arguments import floats
from pytest_trainloop.recording.function_mode import OperationMode
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import tree_leaves
from pytest_trainloop.recording.torch_names import ATEN_DRAWS

if TYPE_CHECKING:
    from pytest_trainloop.instruments.losses.evidence import Loss
    from pytest_trainloop.instruments.strategies.loss_cases import Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PERTURBED = 3

KERNEL = 8
"""Roundings in one kernel: the longest of torch's fused losses (a weighted binary cross-entropy: exp, log1p, a maximum,
three products, two sums) makes eight in a row; a function of the math library is right to within two."""


class Magnitudes(OperationMode):  # type: ignore[no-untyped-call]
    """The number of roundings on the way to the result, at most, and the largest number on it.

    A kernel has ``KERNEL`` roundings, and one more for each entry of its input per entry of its result, which it may
    add up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws_random = False
        self.roundings = 0
        self.largest = 1.0

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        self.draws_random = self.draws_random or any(word in str(func) for word in ATEN_DRAWS)
        made = floats(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        given = [t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in made[:1]:
            self.roundings += KERNEL + math.ceil(max(given, default=0) / tensor.numel())
        for tensor in made:
            self.largest = max(self.largest, float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()))
        return out


def precision_error(loss: Loss, case: Case) -> Finding | None:
    """The first precision in which the value differs from float64 by more than rounding explains."""
    inputs = inputs_of(loss.contract, case)
    if loss.float64(inputs, grad=False).total != loss.float64(inputs, grad=False, seed=1).total:
        raise CannotDecide("the criterion draws random numbers, which differ between precisions")
    raised: list[CriterionRaised] = []
    for dtype in DTYPES:
        try:
            finding = _error_in(dtype, loss, inputs.to(dtype))
        except CriterionRaised as error:
            raised.append(error)
            continue
        if finding is not None:
            return finding
    if len(raised) == len(DTYPES):
        raise raised[-1]
    return None


def _error_in(dtype: torch.dtype, loss: Loss, inputs: LossInputs) -> Finding | None:
    name = str(dtype).removeprefix("torch.")
    result = Caller(loss.contract, loss.as_built.seed, dtype=dtype)(inputs)
    exact_inputs = inputs.to(torch.float64)
    forward, backward = Magnitudes(), Magnitudes()
    exact = loss.float64(exact_inputs, around_forward=forward, around_backward=backward)
    if forward.draws_random:
        raise CannotDecide("the criterion draws random numbers under its own seed, which differ between precisions")
    if not exact.finite or _largest(exact) > torch.finfo(dtype).max:
        return None
    if not result.finite:
        return _not_finite(loss, result, exact, dtype, forward if not math.isfinite(result.total) else backward)
    error = abs(result.total - exact.total)
    unit = torch.finfo(dtype).eps / 2
    if error <= forward.roundings * unit * forward.largest:
        return None
    propagated = _propagated(loss, exact_inputs, exact, unit)
    bound = forward.roundings * (unit * forward.largest + propagated)
    if error <= bound:
        return None
    return Finding(
        cause="loses_digits",
        level="advice" if loss.of_torch else "fault",
        summary=f"the value in {name} is off by {error:.3g}, {error / bound:.3g} times what rounding explains",
        measured=f"{result.total:.6g}, {exact.total:.6g} in float64 of the same numbers; bound {bound:.3g}",
        shown_by=(
            f"{forward.roundings} roundings of numbers up to {forward.largest:.3g}, and {propagated:.3g} for outputs "
            f"that differ in the last digit"
        ),
    )


def _not_finite(loss: Loss, result: CallResult, exact: CallResult, dtype: torch.dtype, numbers: Magnitudes) -> Finding:
    """An intermediate number that is too large for the precision, or is after rounding, may occur in every way to
    compute this loss."""
    name, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    in_range = numbers.largest <= most / 2
    return Finding(
        cause="not_finite" if in_range else "out_of_range",
        level="advice" if loss.of_torch or not in_range else "fault",
        summary=f"{'the gradient' if math.isfinite(result.total) else 'the value'} is not finite in {name}",
        measured=f"{result.total:.4g} in {name}, {exact.total:.6g} in float64 for the same numbers",
        shown_by=f"the result can be represented in {name} (up to {most:.3g}); "
        f"the largest intermediate number is {numbers.largest:.3g} in float64",
    )


def _largest(result: CallResult) -> float:
    entries = [float(result.value.abs().max()), abs(result.total)]
    return max([*entries, *(float(g.abs().max()) for g in result.grads if g is not None and g.numel())])


def _propagated(loss: Loss, inputs: LossInputs, exact: CallResult, unit: float) -> float:
    """The largest change of the value when every number of the call is rounded once more."""
    largest = 0.0
    for number in range(PERTURBED):
        generator = torch.Generator().manual_seed(number)

        def rounded(tensor: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            sign = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
            return tensor * (1.0 + unit * sign)

        total = loss.float64(LossInputs(tuple(map(rounded, inputs.outputs)), inputs.target), grad=False).total
        largest = max(largest, abs(total - exact.total))
    return largest if math.isfinite(largest) else 0.0
