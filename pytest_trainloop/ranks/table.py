"""One table of what each rank did."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_trainloop.ranks.facts import Collective, Rank

MOST_FILES = 4
"""Files that are named in a cell; further ones are counted."""

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that ranks do, and what each of them did."""

    label: str
    cells: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether all ranks did the same."""
        return len(set(self.cells)) == 1


@dataclass(frozen=True, slots=True)
class Table:
    """The rows in a fixed order; ``str()`` is the table as text, a column for each rank."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, ranks: Sequence[Rank], more: Mapping[str, Sequence[Any]] | None = None) -> Table:
        """The table of a launch. ``more`` has further rows by their labels, ahead of the others: what the caller knows
        of each rank (rows taken, numbers drawn)."""
        rows = [Row(label, tuple(map(str, cells))) for label, cells in (more or {}).items()]
        rows += [Row(label, tuple(map(told, ranks))) for label, told in _TOLD.items()]
        return cls(tuple(row for row in rows if set(row.cells) != {NOTHING}))

    def __str__(self) -> str:
        ranks = max((len(row.cells) for row in self.rows), default=0)
        lines = [("", *(f"rank {number}" for number in range(ranks))), *((row.label, *row.cells) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def to_json(self) -> dict[str, Any]:
        """The table as plain data."""
        return {"rows": [asdict(row) for row in self.rows]}


def _steps(rank: Rank) -> str:
    return str(rank.steps)


def _before(rank: Rank) -> str:
    """The calls up to the first backward pass: what wrappers do as they are built."""
    first = next((i for i, call in enumerate(rank.collectives) if call.in_backward or call.steps), None)
    return _calls(rank.collectives[:first])


def _each_step(rank: Rank) -> str:
    """The calls of the commonest step, of those that come after the first one where there are any."""
    windows = list(_windows(rank))
    kinds = Counter(map(_calls, windows[1:] or windows))
    return kinds.most_common(1)[0][0] if kinds else NOTHING


def _windows(rank: Rank) -> Iterator[tuple[Collective, ...]]:
    """The calls ahead of each optimizer step."""
    for step in range(rank.steps):
        window = [call for call in rank.collectives if call.steps == step]
        first = next((i for i, call in enumerate(window) if call.in_backward), 0) if step == 0 else 0
        yield tuple(window[first:])


def _calls(calls: Iterable[Collective]) -> str:
    """Calls by their kinds, with the bytes that the rank gives: "all_reduce 2 x 16 B", several sizes as a sum."""
    by_kind: dict[str, list[int]] = {}
    for call in calls:
        by_kind.setdefault(call.kind, []).append(call.bytes)
    return ", ".join(f"{len(sizes)} {kind}{_of(sum(sizes))}" for kind, sizes in by_kind.items()) or NOTHING


def _of(size: int) -> str:
    if not size:
        return ""
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_of:
            return f" ({size / bytes_of:.3g} {unit})"
    return f" ({size} B)"


def _files(rank: Rank) -> str:
    names = [_shown(written.path) for written in rank.written]
    more = f" and {len(names) - MOST_FILES} more" if len(names) > MOST_FILES else ""
    return ", ".join(names[:MOST_FILES]) + more or NOTHING


def _shown(path: str) -> str:
    full = Path(path)
    return full.relative_to(Path.cwd()).as_posix() if full.is_relative_to(Path.cwd()) else full.name


def _end(rank: Rank) -> str:
    if rank.raised is not None:
        return rank.raised.kind
    return rank.ended or NOTHING


_TOLD = {
    "optimizer steps": _steps,
    "when built": _before,
    "each step": _each_step,
    "wrote": _files,
    "ended by": _end,
}
