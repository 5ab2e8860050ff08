"""Writes, averages and differences of weights that do nothing, and averages that move too often."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.target_networks.causes import found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.wiring.target_networks.writes import Average, Difference, WeightWrites, Write
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record

LEAST_STEPS = 3
"""Steps in which an average must be dropped, move away, or move too often."""


def copied_into_itself(record: Record, seen: WeightWrites) -> Iterator[Finding]:
    """Lines all of whose writes take their values from the memory that they write to: once for values that are put
    back, else in two steps (an option may leave a single one without effect)."""
    changed = {record.name(i) for i in record.changed()}
    by_line: dict[Place, list[Write]] = defaultdict(list)
    for write in seen.writes:
        by_line[write.place].append(write)
    for place, writes in by_line.items():
        put_back = [w for w in writes if w.kept and w.name in changed]
        again = [w for w in writes if w.average or w.fresh]
        if not all(w.own and w.name for w in writes) or not (put_back or len({w.step for w in again}) > 1):
            continue
        names = tuple(dict.fromkeys(w.name for w in put_back or again))
        steps = len({w.step for w in writes})
        variant = "put back" if put_back else ""
        yield found(
            "copied_into_itself", place, names, variant, writes=len(writes), steps=steps, several=len(names) > 1
        )


def average_dropped(record: Record, seen: WeightWrites) -> Iterator[Finding]:
    """Averages of a weight that trains and of one that never moves, which nothing reads and nothing keeps."""
    by_name = {p.name: p for p in record.parameters}
    moving = record.changed() | record.moved_outside_steps()
    by_line: dict[Place, list[Average]] = defaultdict(list)
    for average in seen.averages:
        by_line[average.place].append(average)
    for place, averages in by_line.items():
        last = max(a.step for a in averages)
        if any(len(a.names) < 2 for a in averages):
            continue
        dropped = [a for a in averages if not a.read and (a.result() is None or a.step == last)]
        steps = len({a.step for a in averages})
        pairs = dict.fromkeys(tuple(sorted(a.names, key=lambda n: by_name[n].index in record.held)) for a in averages)
        resting = [by_name[slow] for slow, _ in pairs]
        if len(dropped) < len(averages) or steps < LEAST_STEPS:
            continue
        if any(p.index in record.held or p.index in moving or p.gone for p in resting):
            continue
        if not all(by_name[fast].index in record.held for _, fast in pairs):
            continue
        facts = {"averages": len(averages), "steps": steps, "several": len(resting) > 1}
        yield found("average_dropped", place, tuple(p.name for p in resting), **facts)


def anchor_moves_along(record: Record, seen: WeightWrites) -> Iterator[Finding]:
    """Lines all of whose differences are of a weight and of its own memory, and are trained by."""
    changed = {record.name(i) for i in record.changed()}
    by_line: dict[Place, list[Difference]] = defaultdict(list)
    for difference in seen.differences:
        by_line[difference.place].append(difference)
    for place, differences in by_line.items():
        names = tuple(dict.fromkeys(d.name for d in differences if d.trains and d.name in changed))
        steps = len({d.step for d in differences})
        if names and steps > 1 and all(d.own for d in differences):
            yield found("anchor_moves_along", place, names, compared=len(differences), steps=steps)


def average_moves_away(record: Record, seen: WeightWrites) -> Iterator[Finding]:
    """Lines that take a tensor away from a weight that trains, in step after step."""
    held = {record.name(i) for i in record.held}
    by_line: dict[Place, list[tuple[int, str, float]]] = defaultdict(list)
    for place, step, (average, name), gap in seen.leaving:
        if name in held and average not in held:  # heavy-ball momentum moves a weight so
            by_line[place].append((step, name, gap))
    for place, writes in by_line.items():
        names = tuple(dict.fromkeys(name for _, name, _ in writes))
        steps = len({step for step, _, _ in writes})
        if steps >= LEAST_STEPS:
            facts = {"factor": writes[-1][2], "writes": len(writes), "steps": steps, "several": len(names) > 1}
            yield found("average_moves_away", place, names, **facts)


def average_for_each_micro_batch(record: Record, seen: WeightWrites) -> Iterator[Finding]:
    """Averages that move several times between two steps, with a backward pass in between."""
    held = {record.name(i) for i in record.held}
    passes: dict[tuple[Place, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    moved = [(w.place, w.of, w.step, w.passes) for w in seen.writes if w.average and not w.own]
    for place, of, step, at in moved + [(a.place, a.names, a.step, a.passes) for a in seen.averages]:
        for name in held.intersection(of):
            passes[place, name][step].add(at)
    lines: dict[Place, list[tuple[str, list[int]]]] = defaultdict(list)
    for (place, name), by_step in passes.items():
        counts = [len(by_step[step]) for step in sorted(by_step)]
        windows = counts[1:-1]
        if len(windows) >= LEAST_STEPS and min(windows) > 1:
            lines[place].append((name, windows))
    for place, of_line in lines.items():
        windows = of_line[0][1]
        names = tuple(name for name, _ in of_line)
        facts = {"updates": sum(windows) / len(windows), "steps": len(windows), "level": "advice"}
        yield found("average_for_each_micro_batch", place, names, **facts)
