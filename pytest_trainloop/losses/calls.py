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

from pytest_trainloop.errors import CannotDecide, UsageError
from pytest_trainloop.runs.float64 import double_precision

if TYPE_CHECKING:
    from pytest_trainloop.losscontract import LossContract
    from pytest_trainloop.strategies.loss_cases import Inputs

HALF_THE_DIGITS = math.sqrt(torch.finfo(torch.float64).eps)
"""Two formulas that are one identity in exact numbers agree in float64 to all but a few of its 16 digits, n operations
on entries of one size to n x 2.2e-16 of that size. Formulas that differ do so in their first digits. Half of the digits
lies far from both: a thousandth of it is more rounding than 10,000 operations make."""


class Refused(CannotDecide):
    """The criterion raised for a call that it was made."""

    def __init__(self, error: BaseException) -> None:
        first = str(error).strip().partition("\n")[0]
        super().__init__(f"the criterion raised {type(error).__name__}: {first}")
        self.error = error


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call gave: the tensor, its sum as a number, and the gradient of that sum with respect to each output
    (None where there is no path)."""

    value: torch.Tensor
    total: float
    grads: tuple[torch.Tensor | None, ...]
    warned: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.total) and all(bool(g.isfinite().all()) for g in self.grads if g is not None)


class Caller:
    """Calls the criterion of a contract on fresh copies under one seed; ``wide`` runs every operation in float64."""

    def __init__(self, contract: LossContract, seed: int, *, wide: bool = False, dtype: torch.dtype | None = None):
        self.contract = contract
        self.seed = seed
        self._wide = wide
        self._dtype = dtype
        self._deep = isinstance(contract.criterion, nn.Module) and not _holds_plain_values(contract.criterion)
        self._keyword = _takes_reduction(contract.criterion)

    @property
    def switches(self) -> bool:
        """Whether another reduction can be asked for."""
        criterion = self.contract.criterion
        return self._keyword is not None or isinstance(getattr(criterion, "reduction", None), str)

    @property
    def reduction(self) -> str:
        """What a plain call gives: as declared, else as the criterion says of itself."""
        own = self._keyword or getattr(self.contract.criterion, "reduction", None)
        return self.contract.reduction or (own if own in ("mean", "sum", "none") else "mean")

    def __call__(
        self,
        inputs: Inputs,
        *,
        reduction: str | None = None,
        grad: bool = True,
        seed: int = 0,
        scale: float = 1.0,
        inside: contextlib.AbstractContextManager[Any] | None = None,
        behind: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Answer:
        """The answer to one call; raises ``Refused`` where the criterion raised.

        ``inside`` is entered around the criterion, ``behind`` around its backward pass; ``scale`` multiplies what is
        differentiated.
        """
        outputs = tuple(o.detach().clone().requires_grad_(grad) for o in inputs.outputs)
        target = None if inputs.target is None else inputs.target.clone()
        with contextlib.ExitStack() as stack:
            if self._wide:
                stack.enter_context(double_precision())
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            with inside or contextlib.nullcontext():
                value = self._value(outputs, target, reduction, seed)
            total = value.sum() if value.dim() else value
            with behind or contextlib.nullcontext():
                grads = _gradients(total * scale, outputs) if grad else ()
        return Answer(value.detach(), float(total.detach().to(torch.float64)), grads, bool(caught))

    def custom_functions(self, inputs: Inputs) -> list[str]:
        """The names of the autograd functions with a backward pass of their own that the value comes from."""
        outputs = tuple(o.detach().clone().requires_grad_() for o in inputs.outputs)
        with double_precision() if self._wide else contextlib.nullcontext():
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
        except (Exception, SystemExit) as error:
            raise Refused(error) from error
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
    """Whether nothing of a module could be changed in place, so that copied attributes are enough."""
    ours, own = vars(nn.Module()), vars(module)
    return all(
        isinstance(value, (bool, int, float, str, type(None)))
        or (name in ours and not any(map(_is_held, value.values() if isinstance(value, dict) else value or ())))
        for name, value in own.items()
    )


def _is_held(value: Any) -> bool:
    return value is not None


def _reseed(seed: int) -> None:
    """As ``seed_all``, for the CPU only: torch.manual_seed notes a stack trace for each device not yet in use."""
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
    except Exception as error:
        raise Refused(error) from error


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
    """What a value is, in words for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def size_of(answer: Answer, inputs: Inputs) -> float:
    """The size of the numbers that made a value: what rounding is relative to.

    The value itself, what a relative change of every entry of the outputs would change in it, and 1 for the
    probabilities and exponentials on the way.
    """
    moved = sum(
        float((g.abs() * o.abs()).nan_to_num(0.0, 0.0, 0.0).sum())
        for g, o in zip(answer.grads, inputs.outputs, strict=True)
        if g is not None
    )
    return abs(answer.total) + moved + float(answer.value.numel())


def same(a: float, b: float, size: float) -> bool:
    """Whether two results of one identity agree in float64, for numbers of this size."""
    return abs(a - b) <= HALF_THE_DIGITS * size or (math.isnan(a) and math.isnan(b))
