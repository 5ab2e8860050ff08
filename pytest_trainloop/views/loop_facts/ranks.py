"""The line "ranks": what each of several processes did, where the loop has a knob for their number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.checks.scale.distributed_equivalence.own_batches import own_launch
from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import RankResult
from pytest_trainloop.views.loop_facts.page import Line
from pytest_trainloop.views.loop_facts.words import marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_trainloop.runs.ranks.facts import Collective, Launch, Rank
    from pytest_trainloop.views.loop_facts.facts import Facts

CHECK = "distributed_equivalence"

USUALLY_EQUAL = ("optimizer steps", "weights", "when built", "each step")
"""What is commonly the same on all ranks."""

NOTHING = "-"

MOST_FILES = 4
"""Files that are named; further ones are counted."""


def ranks(facts: Facts) -> Iterator[Line]:
    if "ranks" not in facts.evidence.knobs:
        return
    result = facts.results.get(CHECK)
    if result is None:
        yield Line(label="ranks", text=f"not looked at: {CHECK} was not run", seen=False)
        return
    launched = None if result.outcome == "skipped" else facts.ask(own_launch)
    if launched is None:
        yield Line(label="ranks", text=f"not looked at: {result.reason or facts.why}", seen=False)
        return
    label = "ranks"
    for what, cells in {
        **_known(launched),
        **{what: list(map(read, launched)) for what, read in _READERS.items()},
    }.items():
        same = len(set(cells)) == 1
        if same and cells[0] == NOTHING:
            continue
        each = ", ".join(f"{cell} (rank {number})" for number, cell in enumerate(cells))
        text = f"{cells[0]} on each of {len(cells)}" if same else marked(each, what in USUALLY_EQUAL)
        yield Line(label=label, text=f"{what}: {text}", odd=not same and what in USUALLY_EQUAL)
        label = ""


def _known(launched: Launch) -> dict[str, list[str]]:
    """What the records of the ranks say besides their calls."""
    results = [rank.value for rank in launched]
    if not all(isinstance(result, RankResult) and result.record is not None for result in results):
        return {}
    known = {"batches": [str(result.record.items) for result in results]}
    ends = [result.states[-1] for result in results if len(result.states) > 1]
    if len(ends) == len(results):
        known["weights"] = ["as on rank 0" if end == ends[0] else "other than on rank 0" for end in ends]
    drawn = [{place: tuple(found) for place, found in result.draws.items()} for result in results]
    if any(drawn):
        known["draws"] = ["as on rank 0" if one == drawn[0] else "other than on rank 0" for one in drawn]
    return known


def _before(rank: Rank) -> str:
    """The calls up to the first backward pass: what wrappers do as they are built."""
    first = next((i for i, call in enumerate(rank.collectives) if call.in_backward or call.steps), None)
    return _calls(rank.collectives[:first])


def _each_step(rank: Rank) -> str:
    """The calls ahead of the commonest step, of those that come after the first one where there are any."""
    windows = [[call for call in rank.collectives if call.steps == step] for step in range(rank.steps)]
    if windows:
        begins = next((i for i, call in enumerate(windows[0]) if call.in_backward), 0)
        windows[0] = windows[0][begins:]
    kinds = Counter(map(_calls, windows[1:] or windows))
    return kinds.most_common(1)[0][0] if kinds else NOTHING


def _calls(calls: Iterable[Collective]) -> str:
    """Calls by their kinds, with the bytes that the rank gives, several sizes as a sum: "2 all_reduce (16 B)"."""
    by_kind: dict[str, list[int]] = {}
    for call in calls:
        by_kind.setdefault(call.kind, []).append(call.bytes)
    return ", ".join(f"{len(sizes)} {kind}{_size(sum(sizes))}" for kind, sizes in by_kind.items()) or NOTHING


def _size(size: int) -> str:
    for unit, of_unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)):
        if size >= of_unit:
            return f" ({size / of_unit:.3g} {unit})" if of_unit > 1 else f" ({size} B)"
    return ""


def _files(rank: Rank) -> str:
    here = Path.cwd()
    full = [Path(path) for path in rank.written]
    names = [path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name for path in full]
    more = f" and {len(names) - MOST_FILES} more" if len(names) > MOST_FILES else ""
    return ", ".join(names[:MOST_FILES]) + more or NOTHING


_READERS: Mapping[str, Callable[[Rank], str]] = {
    "optimizer steps": lambda rank: str(rank.steps),
    "when built": _before,
    "each step": _each_step,
    "wrote": _files,
    "ended by": lambda rank: rank.raised.kind if rank.raised is not None else rank.ended or NOTHING,
}
