"""Runs without randomness: dropout returns its input, batch norms use their running statistics, and random numbers are
the same for every row.

The loss is then a function of weights and batch alone, in which examples interact only where the loss makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.recording.function_mode import FunctionMode, aside
from pytest_trainloop.recording.mode_stack import on_in_engine
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import DROPOUTS, RECURRENT
from pytest_trainloop.runs.shared_draws import drawn, shared

if TYPE_CHECKING:
    from collections.abc import Callable


REDRAWN = 2000
"""Equal draws one after the other, above which the loop is taken to draw until one fits: no row, layer or step of a
known loop makes as many of one shape."""


class NoRandomness(FunctionMode):
    """Switches off randomness and batch statistics, call by call; no module of the user's is changed.

    A function draws as it is where ``keeps`` says so of its name.
    """

    in_steps = False

    def __init__(self, keeps: Callable[[str], bool] = lambda name: False) -> None:
        super().__init__()
        self._keeps = keeps
        self._last: tuple[str, torch.Tensor] | None = None
        self._again = 0

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        if name == "backward" and args and isinstance(args[0], torch.Tensor):
            with self:  # a checkpoint recomputes its part of the model in there
                return passed_on(torch.autograd.backward, _of_backward(*args, **kwargs), {})
        if func is torch.autograd.backward:
            with on_in_engine(self):
                return passed_on(func, args, kwargs)
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = _placed(args, kwargs, 4, "dropout_p", 0.0)
        elif name == "multi_head_attention_forward":
            kwargs["training"] = False
        elif name in RECURRENT:
            args = tuple(0.0 if isinstance(a, float) else a for a in args)
        elif name == "batch_norm":
            args, kwargs = _running(args, kwargs)
        out = passed_on(func, args, kwargs)
        if self._keeps(name) or not drawn(name, out):
            return out
        made = self.replaced(name, out, args, kwargs)
        self._require_new(name, made)
        return made

    def _require_new(self, name: str, made: torch.Tensor) -> None:
        """Raise ``CannotDecide`` where the loop draws again and again what was drawn: negatives that must not be
        positives, a partner other than the row itself."""
        with aside():
            same = self._last is not None and self._last[0] == name and torch.equal(self._last[1], made)
            self._again = self._again + 1 if same else 0
            self._last = self._last if same else (name, made.detach().clone())
        if self._again > REDRAWN:
            raise CannotDecide(
                f"{name}() is drawn until it fits, at {here()[0]}, and all draws of a run of this check are equal"
            )

    def replaced(self, name: str, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What replaces the result of a call; the result itself where it draws nothing."""
        return shared(name, out, args, kwargs)


def _of_backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> tuple[Any, ...]:
    """The arguments of ``torch.autograd.backward`` from those of ``Tensor.backward``."""
    return tensor, gradient, retain_graph, create_graph, None, inputs


def _running(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with the running statistics in place of the batch's, where there are any."""
    mean = args[1] if len(args) > 1 else kwargs.get("running_mean")
    return (args, kwargs) if mean is None else _placed(args, kwargs, 5, "training", False)


def _placed(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with this value for one argument, given by position or by name."""
    if len(args) > position:
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}
