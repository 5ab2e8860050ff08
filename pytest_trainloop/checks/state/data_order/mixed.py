"""What a collate function makes of its items: rows that are mixed (mixup, CutMix), and fields of one item alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_trainloop.checks.state.data_order.arrivals import is_target
from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.collations import name_of, of_items, of_project, some_batches
from pytest_trainloop.checks.state.data_order.orders import line_of
from pytest_trainloop.checks.state.data_order.rows import array_of, digest, values_of
from pytest_trainloop.runs.process_state import seed_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.data_order.streams import Stream, Streams
    from pytest_trainloop.core.finding import Finding

    Array = np.ndarray[Any, Any]

LEAST_NUMBERS = 4
"""Numbers of a row, at least: of fewer many pairs of items give the same mixture."""

MOST_BATCHES = 4


def mixed(stream: Stream) -> Iterator[Finding]:
    """Targets that are mixed of other items than their inputs are, or in other shares.

    Each row of inputs is written as a mixture of two items. Classes that its target gives a weight must be theirs; a
    weight that all classes get equally is taken off (label smoothing).
    """
    facts = stream.with_loader(_mixing_mismatch) if line_of(own := of_project(stream.now.of.collate_fn)) else None
    if facts is not None:
        sure = stream.source.as_trained and is_target(stream.evidence, facts["labels"])
        facts["function"] = name_of(own)
        facts |= {"stream": stream.source.name, "kinds": ("input",) * 2, "level": "fault" if sure else "advice"}
        yield found("labels_apart", stream.source, (facts["inputs"], facts["labels"]), "mixed", **facts)


def _mixing_mismatch(loader: Any, streams: Streams) -> dict[str, Any] | None:
    seed_all(streams.loop.seed)
    for indices in some_batches(loader, MOST_BATCHES):
        made = of_items(loader, indices, least=3)
        if made is None:
            return None
        items = made[0]
        batch = {path: _stacked(rows) for path, rows in values_of(made[1]).items()}
        fields = [field for rows in values_of(items).values() if (field := _stacked(rows)) is not None]
        for rows in (field for field in fields if field.dtype.kind == "f" and field.shape[1] >= LEAST_NUMBERS):
            for x, values in batch.items():
                if values is None or values.dtype.kind != "f" or values.shape != rows.shape:
                    continue
                pairs = [_pair(row, rows) for row in values]
                if None in pairs or all(i == j for i, j, _ in filter(None, pairs)):
                    continue
                for y, targets in batch.items():
                    labels = next((one for field in fields if (one := _classes(field, targets)) is not None), None)
                    if labels is None or targets is None or y == x:
                        continue
                    verdicts = [_agrees(t, labels, *pair) for t, pair in zip(targets, pairs, strict=True) if pair]
                    for verdict in ("partner", "share"):
                        if (changed := verdicts.count(verdict)) > 1:
                            facts = {"inputs": x, "labels": y, "rows": len(verdicts), "changed": changed}
                            return {**facts, "shares": verdict == "share"}
    return None


def first_alone(stream: Stream) -> Iterator[Finding]:
    """A field of which a batch has the value of its first item alone, while it has another field of all items."""
    own = of_project(stream.now.of.collate_fn)
    facts = stream.with_loader(_first_alone) if line_of(own) else None
    if facts is not None:
        facts |= {"function": name_of(own), "change": line_of(own)}
        where, names = stream.source, (facts["lost"],)
        yield found("rows_never_drawn", where, names, "the first one", level="advice", stream=where.name, **facts)


def _first_alone(loader: Any, streams: Streams) -> dict[str, Any] | None:
    known: dict[str, Any] | None = None
    seed_all(streams.loop.seed)
    for indices in some_batches(loader, 2):
        made = of_items(loader, indices, least=3)
        if made is None:
            return None
        items, batch = made
        single, whole = (
            {path: [digest(row, streams.pads) for row in rows] for path, rows in values_of(batch, count=n).items()}
            for n in (1, len(items))
        )
        fields = [[digest(row, streams.pads) for row in rows] for rows in values_of(items).values()]
        own = [rows for rows in fields if len(set(rows)) == len(rows)]
        kept = next((path for path, rows in whole.items() if rows in own), "")
        lost = [p for p, (row,) in single.items() if any(row == rows[0] and rows not in whole.values() for rows in own)]
        if not kept or not lost:
            return None
        known = known or {"lost": lost[0], "kept": kept, "rows": len(items), "others": len(items) - 1}
    return known


def _stacked(rows: Any) -> Array | None:
    """One row of numbers for each item."""
    arrays = [array_of(row) for row in rows]
    if any(a is None or a.dtype.kind not in "iuf" or a.shape != arrays[0].shape for a in arrays):  # type: ignore[union-attr]
        return None
    return np.stack(arrays).reshape(len(arrays), -1)  # type: ignore[arg-type]


def _classes(field: Array, targets: Array | None) -> Array | None:
    """The targets of the items as rows of weights, for targets that are such rows."""
    if targets is None or targets.dtype.kind != "f" or targets.shape[1] < 2 or len(field) != len(targets):
        return None
    if field.dtype.kind in "iu" and field.shape[1] == 1 and field.min() >= 0 and field.max() < targets.shape[1]:
        return np.eye(targets.shape[1])[field[:, 0]]
    one_hot = field.shape == targets.shape and np.isin(field, (0, 1)).all() and (field.sum(1) == 1).all()
    return field.astype(float) if one_hot else None


def _pair(row: Array, items: Array) -> tuple[int, int, float] | None:
    """The two items that a row is mixed of, and the share of the first; None where there are none."""
    row, items = row.astype(float), items.astype(float)
    same = items == row
    first = int(same.sum(1).argmax())
    if same[first].all():
        return first, first, 1.0
    if same[first].any():
        rest = [int(j) for j in np.flatnonzero(same[:, ~same[first]].all(1))]
        return (first, rest[0], float(same[first].mean())) if rest else None
    size = np.abs(items).max() or 1.0
    for i, item in enumerate(items):
        way = items - item
        long = (way * way).sum(1)
        part = np.divide((way * (row - item)).sum(1), long, out=np.zeros(len(items)), where=long > 0)
        off = np.abs(item + part[:, None] * way - row).max(1)
        j = int(off.argmin())
        if off[j] < 1e-5 * size and 0 < part[j] < 1:
            return i, j, 1 - float(part[j])
    return None


def _agrees(target: Array, labels: Array, first: int, second: int, share: float) -> str:
    """ "partner" where a class of another item has a weight, "share" where the two weights are exchanged."""
    weights = target.astype(float) - target.min()
    weights /= weights.sum() or 1.0
    own = labels[first] + labels[second] > 0
    if weights[~own].max(initial=0.0) > 1e-3:
        return "partner"
    exchanged = (1 - share) * labels[first] + share * labels[second]
    right = share * labels[first] + (1 - share) * labels[second]
    return "share" if np.allclose(weights, exchanged, atol=1e-3) and not np.allclose(weights, right, atol=0.05) else ""
