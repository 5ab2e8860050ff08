"""One row whose axis a ``squeeze`` removes, and a last batch of few rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.edge_batches.causes import CAUSES, found
from pytest_trainloop.checks.batch.edge_batches.runs import SqueezeCall, Squeezes
from pytest_trainloop.core.wording import direction
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.step_gradients import combined
from pytest_trainloop.instruments.gradients.compare import Agreement, agreement
from pytest_trainloop.instruments.gradients.vectors import vectors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.compositions.step_gradients import StepGradient

SEPARABLE = 1e-9
"""Share of the gradient of two rows that may lie outside the span of the rows' own
(docs/how-it-decides.md#accumulation-as-weights)."""

CLOSE = 1e-7
"""What weights are good to: the residual over the smallest singular value at which they are still determined."""


def row_axis_squeezed(edges: Edges) -> Iterator[Finding]:
    """The loop goes through on one row once the call removes only what it removes from a full batch; as it is, it does
    not, or gives another gradient; and with the axis kept single rows count as they do among others."""
    one, single, rows = edges.one_row, edges.squeezes.calls, edges.count
    if not any(squeeze.removed for squeeze in single.values()) or len(edges.counting) < 2:
        return
    among = Squeezes()
    edges.outcome("whole", edges.whole, among.contexts)
    sites: dict[tuple[str, int], SqueezeCall] = {}
    for key, squeeze in single.items():
        other = among.calls.get(key)
        if other is None or len(other.shape) != len(squeeze.shape) or not other.removed < squeeze.removed:
            continue
        if all(other.shape[axis] % rows == 0 for axis in squeeze.removed - other.removed):
            sites.setdefault(key[:2], squeeze)
    if not sites or one.raised_by_loop or not (one.raised or one.steps):
        return
    kept = Squeezes(among.calls)
    with_axis = edges.outcome("1 row", edges.first, kept.contexts)
    if not with_axis.ok or not with_axis.steps:
        return
    of_rows = partial(edges.gradients.at, contexts=(kept.contexts,))
    expected = of_rows(edges.first)
    if not _exact(expected):
        return
    worst = Agreement(1.0, 1.0, 0.0)
    if not one.raised:
        got = edges.gradients.at(edges.first).gradients
        by_optimizer = [agreement(*vectors([g, got.get(n, {})])) for n, g in expected.gradients.items()]
        worst = max(by_optimizer, key=lambda a: a.difference, default=worst)
        if worst.difference <= edges.gradients.bound(expected):
            return
    # where rows interact, a batch of one row may not be intended
    both = tuple(edges.counting[:2])
    weights = _weights(of_rows(Composition(both)), [of_rows(Composition((row,))) for row in both])
    if not weights:
        return
    enough = [
        squeeze
        for site, squeeze in sites.items()
        if len(sites) > 1
        and _exact(alone := edges.gradients.at(edges.first, contexts=(_only(kept, site).contexts,)))
        and edges.gradients.differ(expected, alone) <= edges.gradients.bound(expected)
    ]
    calls = enough or list(sites.values())
    # an exception is noticed the first time it comes; what is silent is a fault unless no such batch comes
    must_work = edges.ending.leaves_one or not (edges.ending.leaves_none or one.raised)
    facts: dict[str, Any] = {"raised": one.raised, "raised_at": one.where, "level": "fault" if must_work else "advice"}
    if not must_work:
        settle = "the project's DataLoader as batches= says whether one row comes: if it does, this is a fault"
        if edges.ending.leaves_none:
            left = edges.ending.rows
            settle = f"drop_last=True, since {left} rows are left over today and one may be tomorrow"
        facts["repair"] = f"{CAUSES['row_axis_squeezed'].repair}; {settle}"
    longer = f"{worst.ratio:.4g} times as long, {direction(worst.cosine)}"
    yield found(
        "row_axis_squeezed",
        calls[0].place,
        dict.fromkeys(squeeze.call for squeeze in calls),
        "" if one.raised else "silent",
        before=_shape(calls[0].shape),
        after=_shape([size for axis, size in enumerate(calls[0].shape) if axis not in calls[0].removed]),
        differs="not finite" if worst.ratio != worst.ratio else longer,
        weights=", ".join(f"{weight:.3g}" for weight in weights),
        smallest=str(edges.first),
        composition=edges.first.as_data(),
        **facts,
    )


def _only(kept: Squeezes, site: tuple[str, int]) -> Squeezes:
    return Squeezes({key: call for key, call in kept.instead.items() if key[:2] == site})


def _exact(*made: StepGradient) -> bool:
    return all(each.record.double and each.finite for each in made)


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _weights(whole: StepGradient, rows: list[StepGradient]) -> tuple[float, ...]:
    """How two rows weigh in the gradient of both; nothing where that is no sum or mean over rows, since a row depends
    on another, as the returns of a rollout do, which are numbers that weigh its steps."""
    weights: tuple[float, ...] = ()
    for optimizer, gradient in whole.gradients.items() if _exact(whole, *rows) else ():
        if any(bool(values.any()) for values in gradient.values()):
            made = combined(whole, rows, optimizer)
            if made is None or made.residual > SEPARABLE:
                return ()
            mean = all(w > 0 for w in made.weights) and abs(sum(made.weights) - 1) <= CLOSE
            if not mean and any(abs(w - 1) > CLOSE for w in made.weights):
                return ()
            weights = weights or made.weights
    return weights


def leftover_batch(edges: Edges) -> Iterator[Finding]:
    """The loader's own last batch, on which the loop raises or its weights become NaN."""
    end, rows = edges.ending, tuple(edges.counting[: edges.ending.rows])
    if not 0 < end.rows < min(end.batch_size, edges.count) or (end.shuffles and len(rows) < end.rows):
        return
    words = "1 row" if end.rows == 1 else f"{end.rows} rows"
    last = edges.among_full(words, Composition(rows) if end.shuffles else lambda loop: end.last_batch(loop.batches))
    if last.ok or last.raised_by_loop:
        return
    yield found(
        "leftover_batch",
        last.where,
        ("DataLoader", *((last.origin.op,) if last.origin else ())),
        rows=words,
        failure=last.failure,
        data=end.data,
        batch_size=end.batch_size,
        op=last.origin.op if last.origin else "",
        smallest=words,
        composition=last.composition.as_data() if last.composition else None,
    )
