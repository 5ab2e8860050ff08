"""The first call of torch that returns another result in the second of two runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.instruments.tracing.arguments import is_dense
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import as_real, raw_bytes, readable, shape_of
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import no_torch_function
from pytest_trainloop.recording.torch_names import ATTRIBUTES, RECORD_FUNCTION, UNSET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place

MOST_CALLS = 20_000
"""Calls that are noted."""


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first call that differs."""

    op: str
    place: Place
    module: str
    given_same: bool
    """Whether it was given the same tensors and numbers both times."""


@dataclass(frozen=True, slots=True)
class _LoggedCall:
    op: str
    place: Place
    module: str
    given: tuple[object, ...]
    result: tuple[object, ...]


class CallLog(WatchingMode):
    """Notes every call with fingerprints of its arguments and of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_LoggedCall] = []

    def active(self) -> bool:
        """Inside backward passes too: what a checkpoint runs again there may differ."""
        return not (self.watch.is_suspended or self.watch.stepping or len(self.calls) >= MOST_CALLS)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = () if name in ATTRIBUTES else _fingerprint((args, kwargs))
        out = passed_on(func, args, kwargs)
        if name not in ATTRIBUTES and not name.startswith(RECORD_FUNCTION):
            self.calls.append(_LoggedCall(name, here()[0], self.watch.module_path(), given, _fingerprint(out)))
        return out

    def first_difference(self, other: CallLog) -> FirstCall | None:
        """The first call whose result differs, and is not written over before it is read: ``Normal.rsample`` draws into
        ``torch.empty``."""
        unset: dict[object, _LoggedCall] = {}
        for mine, theirs in zip(self.calls, other.calls, strict=False):
            same = mine.op == theirs.op and mine.given == theirs.given
            if same and mine.op in UNSET:
                unset |= dict.fromkeys(mine.result, mine)
            elif mine.op != theirs.op or mine.result != theirs.result or not (same or mine.result):
                read = next((unset[part] for part in mine.given if part in unset and part not in theirs.given), None)
                first = read or mine
                return FirstCall(first.op, first.place, first.module, read is not None or same)
        return None


def _fingerprint(value: Any) -> tuple[object, ...]:
    """Shapes and sums of tensors, and plain numbers as they are: enough to see a difference."""
    with torch.no_grad(), no_torch_function():
        found: list[object] = [_sums(t) for t in tensors_in(value)]
    return (*found, *_numbers(value))


def _sums(tensor: torch.Tensor) -> tuple[object, ...]:
    if not (is_dense(tensor) and tensor.numel() and not tensor.is_quantized and readable(tensor)):
        return (shape_of(tensor),)
    wide = as_real(tensor.detach()).to(torch.float64).flatten()
    ramp = torch.arange(1, wide.numel() + 1, dtype=torch.float64, device=wide.device)
    return (shape_of(tensor), repr(float(wide.sum())), repr(float(wide @ ramp)))


def _numbers(value: Any) -> Iterator[object]:
    for part in value if isinstance(value, (tuple, list)) else ():
        if isinstance(part, (int, float, str, bool)):
            yield part
        elif isinstance(part, torch.Generator):
            yield hashlib.sha256(raw_bytes(part.get_state())).hexdigest()
        elif hasattr(part, "tobytes"):
            yield hashlib.sha256(part.tobytes()).hexdigest()
        elif isinstance(part, (tuple, list)):
            yield from _numbers(part)
        elif isinstance(part, dict):
            yield from _numbers(tuple(part.values()))
