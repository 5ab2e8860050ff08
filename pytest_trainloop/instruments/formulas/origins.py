"""Where the entries of a value come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.recording.torch_names import CASTS, INDEXING, VIEWS

if TYPE_CHECKING:
    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice, Value

MOVES = VIEWS | CASTS | INDEXING


def origin(found: Slice, number: int, past: frozenset[str] = MOVES) -> tuple[Value, Call | None]:
    """The value that this one's entries come from, past reshapes, casts and indexing, and the call that made it."""
    for _ in range(100):
        call = found.call_of(number)
        if call is None or call.name not in past or not call.inputs:
            break
        number = call.inputs[0]
    return found.values[number], found.call_of(number)
