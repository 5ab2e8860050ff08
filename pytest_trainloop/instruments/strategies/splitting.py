"""Ways to cut rows into micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.fields import is_whole

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def splits(n: int, parts: int | None = None) -> SearchStrategy[tuple[int, ...]]:
    """Ways to split ``n`` rows into micro-batches: the sizes, none of them 0, even and uneven.

    Failures shrink to few parts, as even as possible, the larger ones first.

    >>> @given(strategies.splits(len(ids), parts=3))
    ... def test_micro_batches_add_up(sizes):
    ...     losses = [summed_loss(model, part) for part in ids.split(sizes)]
    ...     assert torch.allclose(sum(losses), summed_loss(model, ids))

    Parameters
    ----------
    n
        rows
    parts
        micro-batches; default: 1 to ``n``

    Raises
    ------
    UsageError
        ``n`` is no whole number from 1 on, or ``parts`` is not between 1 and ``n``
    """
    if not is_whole(n):
        given = nested.describe(n)
        raise UsageError(f"splits got {given}; the number of rows is needed, as in splits({max(1, nested.rows(n))})")
    if n < 1:
        raise UsageError(f"splits of {n} rows: at least 1 is needed")
    if parts is not None and not 1 <= parts <= n:
        raise UsageError(f"{n} rows cannot be cut into {parts} parts: give parts from 1 to {n}")
    return _splits(n, parts)


@st.composite
def _splits(draw: st.DrawFn, n: int, parts: int | None) -> tuple[int, ...]:
    k = parts or draw(st.integers(1, n))
    size, more = divmod(n, k)
    even = [size * (i + 1) + min(i + 1, more) for i in range(k)]
    if k == 1 or draw(st.sampled_from(["even", "uneven"])) == "even":
        ends = even
    else:
        ends = []
        for i, wanted in enumerate(even[:-1]):
            free = range((ends or [0])[-1] + 1, n - (k - 2 - i))
            ends.append(draw(st.sampled_from(sorted(free, key=lambda end: abs(end - wanted)))))
        ends.append(n)
    return tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
