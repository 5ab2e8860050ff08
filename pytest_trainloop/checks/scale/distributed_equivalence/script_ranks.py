"""What the ranks of a watched script come to: they ran once, and nothing is run again.

A fault is what no intention explains: weights that part though their wrapper, or the gradients that all ranks step by,
say that they are copies of each other. Ranks that share out the model hold other weights on purpose, and what is
averaged now and then comes together.
"""

from __future__ import annotations

import linecache
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.scale.distributed_equivalence.causes import found
from pytest_trainloop.checks.scale.distributed_equivalence.comparison import clip_norms, entries_of
from pytest_trainloop.checks.scale.distributed_equivalence.own_batches import (
    ROUNDING,
    by_rank,
    bypassed_steps,
    differing,
    ends_apart,
    of_files,
    of_hang,
    of_samplers,
    of_unreduced,
    parts_first,
    read_apart,
    same_everywhere,
    steps_of,
)
from pytest_trainloop.checks.scale.distributed_equivalence.script_runs import STEPS, ScriptRank
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.gradients.compare import first_backward
from pytest_trainloop.recording.events import ClipCall
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Step
    from pytest_trainloop.runs.ranks.facts import Hang, Launch

SAME = 3
"""Steps for which ranks must be given the same, and not the same at each of them, before their rows are called so."""

BRINGS_TOGETHER = (
    *("all_reduce", "allreduce", "all_gather", "reduce(", "broadcast", "averag", "synchron", "merge_", ".recv"),
    *(
        "dataparallel(",
        "ddp(",
        "fsdp",
        "fully_shard",
        "horovod",
        "hvd.",
        "mpi4py",
        "deepspeed",
        "accelerat",
        "lightning",
    ),
)
"""Parts of the names by which a script could bring weights together after the steps that were watched."""


def of_script(launch: Launch) -> Iterator[Finding]:
    """Raises ``CannotDecide`` where ranks cannot be compared."""
    ranks = [rank.value if isinstance(rank.value, ScriptRank) else None for rank in launch]
    results = [result for result in ranks if result is not None]
    for finding in _findings(launch, ranks, results):
        steps = min((rank.steps for rank in launch), default=0)
        yield replace(finding, measured=f"{len(launch)} ranks of the script, {steps} optimizer steps")


def _findings(launch: Launch, ranks: Sequence[ScriptRank | None], results: list[ScriptRank]) -> Iterator[Finding]:
    for result in results:
        what = result.record.raised if result.record is not None else None
        if what is not None and (unreduced := of_unreduced(result, what)):
            yield unreduced
            return
    if (hang := launch.hang) is not None and _is_of_the_script(hang, ranks):
        waits = ranks[hang.rank]
        lasts = [other.last for other in hang.others]
        ran_out = hang.collective.in_backward and all(last and last.place == hang.line for last in lasts)
        yield of_hang(hang, "building" if waits is not None and waits.building else "uneven" if ran_out else "")
        return
    if len(results) < len(ranks) or any(result.record is None or not steps_of(result.require()) for result in results):
        without = [
            str(number)
            for number, result in enumerate(ranks)
            if result is None or result.record is None or not steps_of(result.record)
        ]
        raise CannotDecide(f"no optimizer step was seen on rank {', '.join(without)}: ranks are not compared")
    to_the_end = not any(result.stopped for result in results) and all(len(r.states) <= STEPS for r in results)
    if len({len(result.states) for result in results}) > 1:  # compared as far as all have come
        count = min(len(result.states) for result in results) - 1
        results = [replace(result, states=result.states[: max(1, count)]) for result in results]
    yield from _of_weights(results, to_the_end=to_the_end)
    yield from _of_clips(results)
    yield from _of_rows(results)
    yield from of_samplers(results)
    if len({result.machine for result in results}) == 1:
        yield from of_files(results)


def _is_of_the_script(hang: Hang, ranks: Sequence[ScriptRank | None]) -> bool:
    """Whether a rank waits for others that came to their end by themselves: not for one that raised, which is shown,
    nor for one that the command stopped, unless a wrapper is built that the other trains without."""
    if any(other.how == "raised" for other in hang.others):
        return False
    others = [ranks[other.number] for other in hang.others]
    if not any(other is not None and other.stopped for other in others):
        return True
    waits = ranks[hang.rank]
    return waits is not None and waits.building


# weights


def _of_weights(results: Sequence[ScriptRank], *, to_the_end: bool) -> Iterator[Finding]:
    names = _copies(results)
    records = [result.require() for result in results]
    at_once = list(zip(*map(steps_of, records), strict=False))
    read = [
        set(read_apart(records, steps, names))
        for steps in at_once
        if all(step.reads and entries_of(r, step.reads[0].grads) for r, step in zip(records, steps, strict=True))
    ]
    reduced = _reduced(results, names)
    steady = reduced - set().union(*read)  # all ranks read the same gradient of them in every step
    wrapped = set.intersection(*(result.wrapped for result in results))
    if not read or min(len(result.states) for result in results) < 3:
        return  # of one step nothing follows
    other = set(differing(results, [result.states[0] for result in results]))
    if start := tuple(name for name in names if name in other and name in steady):
        yield found("start_differs", "", start, "script", steps=len(read))
        return
    part = [name for name in ends_apart(results) if name not in other]
    stepped = set().union(*(result.stepped for result in results))
    later = tuple(name for name in part if name in names and name in stepped)
    together = tuple(name for name in later if name in wrapped or name in steady)
    if together:
        loose = any(result.loose for result in results)  # they may be averaged every N steps
        if to_the_end or not loose:
            yield _parting(results, together, level="advice" if loose else "fault")
    elif later and not wrapped and not steady:
        if all(differ.intersection(later) for differ in read) and _shares_out(results):
            level = "advice" if _could_average() else "fault"
            yield found("never_synchronised", "", (), "script", ranks=len(results), level=level)
    elif later:
        others = len(steady)
        yield found("parameters_not_in_wrapper", "", later, "script", others=others, level="advice")
    yield from _of_state(results)


def _copies(results: Sequence[ScriptRank]) -> list[str]:
    """The weights that all ranks hold under one name, in one shape; a rank may have several models with one name."""
    known = [[(plain(p.name), p.shape) for p in result.require().parameters] for result in results]
    shapes = [{name: shape for name, shape in of_rank if [n for n, _ in of_rank].count(name) == 1} for of_rank in known]
    parts = set().union(*(result.ends.keys() | result.shards.keys() for result in results))
    return [
        name
        for name, shape in shapes[0].items()
        if name not in parts and all(other.get(name) == shape for other in shapes[1:])
    ]


def _reduced(results: Sequence[ScriptRank], names: Sequence[str]) -> set[str]:
    """The weights whose gradient is not zero in some step."""
    record = results[0].require()
    read = [entries_of(record, step.reads[0].grads) for step in steps_of(record) if step.reads]
    return {name for grads in read for name, entries in grads.items() if bool(entries.any())} & set(names)


def _parting(results: Sequence[ScriptRank], names: tuple[str, ...], *, level: str) -> Finding:
    """Weights that part, of a wrapper, or though all ranks step by the same gradients."""
    if set(names) <= results[0].wrapped and not any(result.wrapper_calls for result in results):
        return found("wrapper_bypassed", "", (), "script", ranks=len(results))
    if bare := bypassed_steps(results, names):
        steps = len(results[0].called)
        return found("wrapper_bypassed", "", (), "steps", bare=len(bare), steps=steps, step=bare[0] + 1)
    first, line = parts_first(results, names)
    return found("weights_drift", line, names, first=first, level=level)


def _shares_out(results: Sequence[ScriptRank]) -> bool:
    """Whether a DistributedSampler shares rows out over all ranks."""
    return all(any(s.replicas == len(results) for s in result.samplers) for result in results)


def _could_average() -> bool:
    """Whether some file of the script's own names what could bring weights together."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and layer(file) == 2:
            text = "".join(linecache.getlines(file)).lower()
            if any(part in text for part in BRINGS_TOGETHER):
                return True
    return False


def _of_state(results: Sequence[ScriptRank]) -> Iterator[Finding]:
    """Buffers that part in a wrapper that does not send them."""
    own = set.intersection(*(result.own_buffers for result in results))
    names = [n for n in differing(results, [result.states[-1] for result in results]) if n in own]
    norms = {plain(s.name): plain(s.owner) for s in results[0].require().statistics}
    if of_norms := tuple(dict.fromkeys(norms[name] for name in names if name in norms)):
        yield found("batch_norm_per_rank", "", of_norms, level="advice")
    if others := tuple(name for name in names if name not in norms):
        yield found("weights_drift", "", others, "state", level="advice")


# clips and rows


def _of_clips(results: Sequence[ScriptRank]) -> Iterator[Finding]:
    """Gradients that each rank clips by a norm of its own, and that all ranks read in the same way: they are reduced
    after the clip."""
    records = [result.require() for result in results]
    clips = [clip_norms(record) for record in records]
    norms = [of_rank for of_rank, _ in clips]
    steps: list[Step] = [steps_of(record)[0] for record in records]
    names = _copies(results)
    if (
        not norms[0]
        or len(set(map(len, norms))) > 1
        or read_apart(records, steps, names)
        or not _reduced(results, names)
    ):
        return
    for at_once in zip(*norms, strict=True):
        if max(at_once) - min(at_once) > ROUNDING["float32"] * max(at_once):
            limit = min(call.limit for record in records for call in record.of(ClipCall))
            cuts = any(norm > limit for of_rank in norms for norm in of_rank)
            level = "fault" if cuts else "advice"
            yield found("norm_of_one_shard", clips[0][1], (), "script", norms=by_rank(at_once), level=level)
            return


def _of_rows(results: Sequence[ScriptRank]) -> Iterator[Finding]:
    given = [result.given for result in results]
    count = min(map(len, given))
    same = all(other[:count] == given[0][:count] for other in given[1:])
    orders = {s.order for result in results for s in result.samplers if s.replicas == len(results)}
    if not same or count < SAME or len(set(given[0][:count])) < SAME or len(orders) > 1:
        return
    wrapped = all(result.wrapper_calls and result.wrapped for result in results)
    if not wrapped and not same_everywhere(results):  # each takes its own part of a batch that all are given
        return
    level = "fault" if wrapped and all(result.loaded for result in results) else "advice"
    first = first_backward(results[0].require(), 0)
    yield found("same_rows_on_every_rank", first or "", (), "script", ranks=len(results), same=count, level=level)
