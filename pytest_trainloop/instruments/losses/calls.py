"""One call of a criterion: a fresh copy of it, its value, and the gradient with respect to each output."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core.errors import CannotDecide, UsageError
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.runs.float64 import double_precision

if TYPE_CHECKING:
    from pytest_trainloop.declare.losscontract import LossContract
    from pytest_trainloop.instruments.strategies.loss_cases import LossInputs

HALF_THE_DIGITS = math.sqrt(torch.finfo(torch.float64).eps)
"""Two formulas that are equal in exact arithmetic agree in float64 to all but a few of its 16 digits: after n
operations on entries of one size they differ by at most n x 2.2e-16 of that size. Formulas that are not equal differ in
their first digits. Half of the digits lies far from both: a thousandth of it is more than 10,000 roundings add up to.
"""


class CriterionRaised(CannotDecide):
    """The criterion raised an exception."""

    def __init__(self, error: BaseException) -> None:
        first = str(error).strip().partition("\n")[0]
        super().__init__(f"the criterion raised {type(error).__name__}: {first}")
        self.error = error


@dataclass(frozen=True, slots=True)
class CallResult:
    """What one call of the criterion returned, and its gradients."""

    value: torch.Tensor
    total: float
    """The sum of the value's entries."""
    grads: tuple[torch.Tensor | None, ...]
    """The gradient of ``total`` with respect to each output, None where there is no path."""
    warned: bool
    """Whether a warning was issued."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.total) and all(bool(g.isfinite().all()) for g in self.grads if g is not None)


class Caller:
    """Calls fresh copies of a contract's criterion under one seed, with ``float64`` every operation in float64."""

    def __init__(self, contract: LossContract, seed: int, *, float64: bool = False, dtype: torch.dtype | None = None):
        self.contract = contract
        self.seed = seed
        self._float64 = float64
        self._dtype = dtype
        self._deep = isinstance(contract.criterion, nn.Module) and not _holds_plain_values(contract.criterion)
        self._keyword = _takes_reduction(contract.criterion)

    @property
    def switches(self) -> bool:
        """Whether the criterion has a ``reduction`` keyword or attribute."""
        criterion = self.contract.criterion
        return self._keyword is not None or isinstance(getattr(criterion, "reduction", None), str)

    @property
    def reduction(self) -> str:
        """The reduction of a plain call: as declared, else the criterion's own, else the mean."""
        own = self._keyword or getattr(self.contract.criterion, "reduction", None)
        return self.contract.reduction or (own if own in ("mean", "sum", "none") else "mean")

    def __call__(
        self,
        inputs: LossInputs,
        *,
        reduction: str | None = None,
        grad: bool = True,
        seed: int = 0,
        scale: float = 1.0,
        around_forward: contextlib.AbstractContextManager[Any] | None = None,
        around_backward: contextlib.AbstractContextManager[Any] | None = None,
    ) -> CallResult:
        """The result of one call; raises ``CriterionRaised`` where the criterion raised.

        ``around_forward`` is entered around the criterion, ``around_backward`` around its backward pass; ``scale``
        multiplies the value before the backward pass.
        """
        outputs = tuple(o.detach().clone().requires_grad_(grad) for o in inputs.outputs)
        target = None if inputs.target is None else inputs.target.clone()
        with contextlib.ExitStack() as stack:
            if self._float64:
                stack.enter_context(double_precision())
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            with around_forward or contextlib.nullcontext():
                value = self._value(outputs, target, reduction, seed)
            total = value.sum() if value.dim() else value
            with around_backward or contextlib.nullcontext():
                grads = _gradients(total * scale, outputs) if grad else ()
        return CallResult(value.detach(), float(total.detach().to(torch.float64)), grads, bool(caught))

    def custom_functions(self, inputs: LossInputs) -> list[str]:
        """The names of the ``torch.autograd.Function`` classes in the graph of the value."""
        outputs = tuple(o.detach().clone().requires_grad_() for o in inputs.outputs)
        with double_precision() if self._float64 else contextlib.nullcontext():
            value = self._value(outputs, inputs.target, None, 0)
        found: dict[str, None] = {}
        nodes, known = [value.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in known:
                continue
            known.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                found[type(node).__name__.removesuffix("Backward")] = None
            nodes.extend(before for before, _ in node.next_functions)
        return list(found)

    def _value(
        self, outputs: tuple[torch.Tensor, ...], target: torch.Tensor | None, reduction: str | None, seed: int
    ) -> torch.Tensor:
        arguments = outputs if target is None else (*outputs, target)
        try:
            criterion = self._fresh(reduction)
            keywords = {"reduction": reduction} if reduction and self._keyword is not None else {}
            _reseed(self.seed + seed)
            value = criterion(*arguments, **keywords)
        except (Exception, SystemExit) as error:  # of the criterion
            reraise_ours(error)
            raise CriterionRaised(error) from error
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise UsageError(f"LossContract.criterion returned {kind(value)}; a floating tensor is needed, as in "
                             "criterion=lambda output, target: loss(output, target)[0]")  # fmt: skip
        return value

    def _fresh(self, reduction: str | None) -> Any:
        criterion = self.contract.criterion
        if not isinstance(criterion, nn.Module):
            return criterion
        criterion = copy.deepcopy(criterion) if self._deep else _copied(criterion)
        if self._dtype is not None:
            criterion = criterion.to(self._dtype)
        if reduction and self._keyword is None:
            criterion.reduction = reduction  # type: ignore[assignment]
        return criterion


def _copied(module: nn.Module) -> nn.Module:
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(vars(module))
    return copied


def _holds_plain_values(module: nn.Module) -> bool:
    """Whether no attribute of a module could be changed in place, so that a shallow copy is enough."""
    plain = vars(nn.Module())

    def is_empty(value: Any) -> bool:
        entries = value.values() if isinstance(value, dict) else value or ()
        return all(entry is None for entry in entries)

    return all(
        isinstance(value, (bool, int, float, str, type(None))) or (name in plain and is_empty(value))
        for name, value in vars(module).items()
    )


def _reseed(seed: int) -> None:
    """As ``seed_all``, for the CPU only: ``torch.manual_seed`` stores a stack trace for each device not yet in use."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _gradients(total: torch.Tensor, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    if not total.requires_grad:
        return (None,) * len(outputs)
    try:
        return torch.autograd.grad(total, outputs, allow_unused=True)
    except Exception as error:  # of the criterion's own backward pass
        reraise_ours(error)
        raise CriterionRaised(error) from error


def _takes_reduction(criterion: Any) -> str | None:
    """The default of the criterion's own ``reduction`` keyword."""
    if isinstance(criterion, nn.Module):
        return None
    try:
        parameter = inspect.signature(criterion).parameters.get("reduction")
    except (TypeError, ValueError):
        return None
    return parameter.default if parameter is not None and isinstance(parameter.default, str) else None


def kind(value: Any) -> str:
    """The kind of a value, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def size_of(result: CallResult, inputs: LossInputs) -> float:
    """The size of the numbers that a value was computed from, to which rounding is relative.

    The sum of the value itself, its change for a relative change of every entry of the outputs, and 1 for each
    intermediate probability or exponential.
    """
    change = sum(
        float((g.abs() * o.abs()).nan_to_num(0.0, 0.0, 0.0).sum())
        for g, o in zip(result.grads, inputs.outputs, strict=True)
        if g is not None
    )
    return abs(result.total) + change + float(result.value.numel())


def same(a: float, b: float, size: float) -> bool:
    """Whether two float64 results, computed from numbers of this size, are equal up to rounding."""
    return abs(a - b) <= HALF_THE_DIGITS * size or (math.isnan(a) and math.isnan(b))
