"""What the forward passes at one line are given and give, and what they would give in evaluation mode."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pytest_trainloop import nested
from pytest_trainloop.recording.torch_names import ATTENTION, RECURRENT, RUNNING_NORMALISATIONS
from pytest_trainloop.runs.hooks import call_from_outside, hooked
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from pytest_trainloop.recording.watch import Watch

_MAY_DROP = ATTENTION | (RECURRENT - {"rnn_relu"})


class Passes(WatchingMode):
    """Notes the calls of a model at one line: the first result, what each call was given in which optimizer step, and
    whether dropout or a norm of torch's worked as in training. ``evaluating`` switches the model for these calls."""

    def __init__(self, site: object, *, evaluating: bool) -> None:
        super().__init__()
        self._site = site
        self._evaluating = evaluating
        self._inside = 0
        self._open = False
        self._switched: list[nn.Module] = []
        self.result: list[torch.Tensor] | None = None
        self.shape: object = None
        self.given: list[tuple[int, str]] = []
        self.repeated_rows = False
        self.dropped = False
        self.normed = False

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, _args: Any) -> None:
            with watch.quietly():
                if self._inside:
                    self._inside += 1
                elif (call := call_from_outside(watch, module)) is not None and call.site == self._site:
                    self._inside = 1
                    self._switch(module)

        def leave(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._inside = max(0, self._inside - 1)
            if self._inside or not self._open:
                return
            self._open = False
            for part in self._switched:
                part.training = True
            with watch.quietly():
                self._note(watch, (args, kwargs), output)

        before = register_module_forward_pre_hook(enter)
        after = register_module_forward_hook(leave, with_kwargs=True, always_call=True)
        with super().watching(watch), hooked(before, after):
            yield

    def _switch(self, root: nn.Module) -> None:
        self._open = True
        self._switched = [m for m in root.modules() if m.training] if self._evaluating else []
        for part in self._switched:
            part.training = False

    def _note(self, watch: Watch, given: Any, output: Any) -> None:
        tensors = [t for t in nested.tensors(given) if t.layout is torch.strided and not t.is_meta]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.detach().cpu().to(torch.float64).contiguous().numpy().tobytes())
        self.given.append((watch.record.steps, digest.hexdigest()))
        first = next((t for t in tensors if t.dim() > 1 and len(t) > 1), None)
        if first is not None and not self.repeated_rows:
            rows = first.detach().flatten(1)
            self.repeated_rows = 2 * len(torch.unique(rows, dim=0)) <= len(rows)
        if self.result is None and output is not None:
            self.result = [t.detach().clone() for t in nested.tensors(output)]
            self.shape = _shape(output)

    @property
    def samples(self) -> bool:
        """Whether the same is looked at several times between two steps, or in one call: what differs is wanted."""
        return self.repeated_rows or len(set(self.given)) < len(self.given)

    @property
    def held_out(self) -> bool:
        """Whether the first thing that is looked at in each phase is always the same."""
        first: dict[int, str] = {}
        for step, digest in self.given:
            first.setdefault(step, digest)
        return len(first) > 1 and len(set(first.values())) == 1

    def same_result(self, other: Passes) -> bool:
        return (
            self.same_shape(other)
            and self.result is not None
            and other.result is not None
            and all(torch.equal(a, b) for a, b in zip(self.result, other.result, strict=True))
        )

    def same_shape(self, other: Passes) -> bool:
        return self.shape == other.shape

    def active(self) -> bool:
        """Inside of the calls at the line, wherever in the loop it lies."""
        return self._inside > 0

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.dropped = self.dropped or name in _MAY_DROP or ("dropout" in name and _flag(args, kwargs, 2, True))
        self.normed = self.normed or (name in RUNNING_NORMALISATIONS and _flag(args, kwargs, 5, False))
        return func(*args, **kwargs)


def _flag(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: bool) -> bool:
    value = kwargs.get("training", kwargs.get("use_input_stats", default))
    return bool(args[position] if len(args) > position else value)


def _shape(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {str(k): _shape(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_shape, value)]
    return type(value).__name__
