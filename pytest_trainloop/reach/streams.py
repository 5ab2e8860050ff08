"""Iterators of Python itself: how far they have come, and how they are set back."""

from __future__ import annotations

import itertools
import types
import warnings
from typing import Any

_ITERTOOLS = (itertools.count, itertools.cycle, itertools.islice, itertools.chain, itertools.repeat)


def position(stream: Any) -> Any:
    """How far an iterator has come: something to compare, and for ``set_back``; None where it cannot be told."""
    if isinstance(stream, types.GeneratorType):
        frame = stream.gi_frame
        if frame is None:
            return None
        return frame.f_lasti, tuple(v for v in frame.f_locals.values() if isinstance(v, (int, float, str)))
    reduced = _reduced(stream)
    if reduced is None:
        return None
    state = reduced[2] if len(reduced) > 2 else None
    plain = tuple(part for part in reduced[1] if isinstance(part, (int, float)))
    return (state if isinstance(state, (int, tuple)) else None, plain)


def set_back(stream: Any, kept: Any) -> bool:
    """Set an iterator to where it was. Only those over a list, a tuple, text or a range can be."""
    if position(stream) == kept:
        return True
    if isinstance(stream, _SETTABLE) and isinstance(kept, tuple) and isinstance(kept[0], int):
        if _reduced(stream) is None or len(_reduced(stream)[1]) == 0 or not _reduced(stream)[2:]:
            return False  # at its end, where it has dropped what it went over
        stream.__setstate__(kept[0])
        return True
    return False


def inside(stream: Any) -> tuple[Any, ...]:
    """What an iterator goes over, also further iterators."""
    reduced = _reduced(stream)
    return () if reduced is None else tuple(reduced[1])


_SETTABLE: tuple[Any, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter(b"")))

_PLAIN: tuple[Any, ...] = (*_SETTABLE, type(enumerate(())), type(zip(())), type(map(len, ())), type(filter(None, ())))


def _reduced(stream: Any) -> Any:
    """What pickle would be told of an iterator of Python itself; of others nothing, since theirs may be anybody's."""
    if type(stream) not in _PLAIN + _ITERTOOLS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return stream.__reduce__()
    except (TypeError, AttributeError):
        return None
