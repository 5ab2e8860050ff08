"""Whether the target of one row is compared with the outputs of all: ``y[0]`` is broadcast."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.batches.row_axis import rows_known
from pytest_trainloop.batches.values import alike, plain
from pytest_trainloop.checks.batch.every_row_teaches.cuts import as_given
from pytest_trainloop.checks.batch.every_row_teaches.one_pass import example, read_by, roots_of, step_seen
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.recording.torch_names import CASTS, INDEXING, RESHAPES, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.call_log import Call, Calls, Value

_WHOLE = CASTS | RESHAPES | {"squeeze", "unsqueeze", "deepcopy"}
"""They keep all entries in their order."""


@dataclass(frozen=True, slots=True)
class OneTarget:
    """Of ``name`` only ``row`` is read, at ``place``, and meets the outputs of all ``rows`` in ``op``."""

    name: str
    row: int
    rows: int
    op: str
    place: Place
    before: float
    """The loss."""
    after: float
    """The loss with the whole tensor in the place of its row."""


def one_target(evidence: Evidence, suspected: Calls) -> OneTarget | None:
    """A tensor of the batch of which one row stands for all. ``suspected`` are calls of a step."""
    made = evidence.shared(StepGradients.of)
    rows = made.rows
    if rows < 3 or made.axis != 0 or not any(_picks(suspected, rows)) or not rows_known(example(evidence), 0):
        return None
    seen, record = step_seen(evidence, {})
    given = dict(zip((id(v) for v in seen.batch), seen.tensors, strict=True))
    for value, row, pick, meeting in _picks(seen, rows):
        tensor = given.get(id(value))
        if tensor is None or not plain(tensor) or alike(tensor):
            continue
        _, other = step_seen(evidence, {pick.number: as_given})
        if other.raised is None and roots_of(other) != roots_of(record):
            before, after = (sum(roots_of(r)) for r in (record, other))
            return OneTarget(value.of_batch, row % rows, rows, meeting.name, meeting.place, before, after)
    return None


def _picks(seen: Calls, rows: int) -> Iterator[tuple[Value, int, Call, Call]]:
    """Tensors of so many rows without a history of which one row alone is read, that row, the call that picks it, and
    the call in which it meets something of all rows that the model made."""
    reads: dict[int, list[tuple[Value, Call]]] = defaultdict(list)
    for call in seen.calls:
        for value in call.inputs if read_by(call) and call.name not in _WHOLE else ():
            source = value.source(_WHOLE)
            if source.made_by is None and not source.history and source.shape[:1] == (rows,):
                reads[id(source)].append((source, call))
    for taken in reads.values():
        picked = {_one_row(call, rows) for _, call in taken}
        row = picked.pop() if len(picked) == 1 else None
        meeting = (
            next(filter(None, (_meeting(seen, call, rows) for _, call in taken)), None) if row is not None else None
        )
        if row is not None and meeting is not None:
            yield taken[0][0], row, taken[0][1], meeting


def _one_row(call: Call, rows: int) -> int | None:
    """The row that an index with constants takes alone."""
    if call.name != "__getitem__" or len(call.plain) < 2:
        return None
    first = call.plain[1][0] if isinstance(call.plain[1], tuple) and call.plain[1] else call.plain[1]
    if isinstance(first, slice):
        taken = range(rows)[first]
        return taken[0] if len(taken) == 1 else None
    return range(rows)[first] if isinstance(first, int) and not isinstance(first, bool) else None


def _meeting(seen: Calls, pick: Call, rows: int) -> Call | None:
    """The call in which what is picked, moved or cast, meets a result of the model with all rows."""
    picked = {id(v) for v in pick.outputs}
    for call in seen.calls[pick.number + 1 :]:
        mine = any(id(v) in picked for v in call.inputs)
        if mine and call.name in CASTS | VIEWS | INDEXING:
            picked |= {id(v) for v in call.outputs}
        elif mine and any(v.history and v.shape[:1] == (rows,) for v in call.inputs):
            return call
    return None
