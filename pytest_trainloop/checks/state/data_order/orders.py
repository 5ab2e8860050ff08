"""What epochs contradict in themselves: their order, and the pairs of inputs and labels; what ``fit`` trains on."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from pytest_trainloop.checks.state.data_order.arrivals import is_target
from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.reading import (
    LEAST_ROWS,
    MOST_BATCHES,
    LoaderPasses,
    epoch_setter,
    read,
    sizes,
)
from pytest_trainloop.checks.state.data_order.streams import (
    ReachableObjects,
    in_this_process,
    length,
    pair_stored,
    shared_lists,
    shared_slots,
)
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.wording import count
from pytest_trainloop.instruments.tracing.data_lines import DataLines
from pytest_trainloop.instruments.tracing.definitions import index, source_of_draws
from pytest_trainloop.instruments.tracing.statements import loop_of, only_call, only_call_in
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.runs.batch_stream import generators_kept
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop.checks.state.data_order.reading import Epoch, Pass, Reading
    from pytest_trainloop.checks.state.data_order.streams import Source, Stream, Streams
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

SAME_BATCHES = 8
"""Batches that hold the same rows, at least, for a stream of one batch."""

LABEL_ROWS = 4
"""Rows of a batch with one label, at least."""

MOST_IN_FIT = 50
"""Batches of an epoch that ``fit`` is run over twice, at most."""

COMPARED_STEPS = 2
"""Optimizer steps on an epoch's last batch and on full ones."""

RESEEDING = frozenset({"manual_seed", "seed_everything", "set_seed", "seed_all", "set_rng_state"})
"""What code that reseeds torch calls: its samplers draw with torch."""

SAMPLING = frozenset({"sample", "choice", "choices", "randint", "randperm", "multinomial", "permutation"})
FILLING = frozenset({"append", "appendleft", "extend", "push", "add", "store"})
"""What a loop calls that fills a buffer and samples from it."""


ENOUGH = 10.0
"""Bits: of 1024 streams that draw some labels at random, fewer than one holds as many of each kind every time."""

MORE = 5
"""How many times as many epochs are read where two hold the same labels in other pairs."""


# As it was read


def no_batch(source: Source) -> Iterator[Finding]:
    """A loader drops the only batch that it could give."""
    sampler = getattr(source.of, "batch_sampler", None) if source.kind == "loader" else None
    with contextlib.suppress(TypeError, NotImplementedError):
        if isinstance(sampler, BatchSampler) and sampler.drop_last and len(source.of.dataset) and len(source.of) == 0:
            rows: int = len(sampler.sampler)  # type: ignore[arg-type]
            yield found("no_batch", source, (source.name,), rows=rows, size=sampler.batch_size)


def of_epochs(stream: Stream) -> Iterator[Finding]:
    """What the order of two epochs shows."""
    source, reading, epochs = stream.source, stream.reading, stream.epochs
    batches, name = reading.epochs[0].batches, reading.identity
    whole = [tuple((path, leaf.digests) for path, leaf in batch.items()) for batch in batches]
    *runs, last = (len(list(group)) for _, group in itertools.groupby(whole))
    if source.trains:
        yield from _shuffled(stream)
    if source.kind == "list":
        pass
    elif _begins_again(stream):
        change = only_call_in(line_of(stream.streams.loop.fit), "iter")
        yield found("one_batch_only", source, (source.name,), "begun again", batches=len(batches), change=change)
    elif source.trains and _one_batch(batches, name) and not (stream.is_loader and length(source.of) == 1):
        # a loader of one batch an epoch gives all its data (odd: full_batch)
        change = _index_of(stream)
        yield found("one_batch_only", source, (source.name,), level="advice", batches=len(batches), change=change)
    elif len(runs) > 1 and len(set(runs)) == 1 and 1 < runs[0] >= last:
        change = _index_of(stream)
        yield found("batch_repeats", source, (source.name,), level="advice", times=runs[0], change=change)
    if source.trains and epochs and len(epochs[0].batches) > 2 and not any(epoch.draws for epoch in epochs):
        yield from _sorted_by_label(stream, epochs[0])


def _one_batch(batches: Sequence[Any], name: str) -> bool:
    if len(batches) < SAME_BATCHES or any(name not in batch for batch in batches):
        return False
    return len({frozenset(Counter(batch[name].digests).items()) for batch in batches}) == 1


def _sorted_by_label(stream: Stream, epoch: Epoch) -> Iterator[Finding]:
    """A leaf of labels that comes in blocks, each longer than a batch, in an order that nothing drew."""
    for name in epoch.leaves:
        if not epoch.batches[0][name].is_label or min(sizes(epoch.batches[:-1])) < LABEL_ROWS:
            continue
        column = epoch.column(name)
        labels, blocks = len(set(column)), len([1 for _ in itertools.groupby(column)])
        alone = sum(len(set(batch[name].digests)) == 1 for batch in epoch.batches)
        if 1 < labels == blocks and alone > labels and 2 * alone >= len(epoch.batches):
            facts: dict[str, Any] = {"alone": alone, "batches": len(epoch.batches), "labels": labels}
            yield found("one_label_a_batch", stream.source, (name,), level="advice", kinds=("input",), **facts)
            return


def line_of(function: Any) -> str:
    """The line that defines a function, or what a callable object calls, if it is the project's own."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None or layer(code.co_filename) != 2 else str(place_of(code.co_filename, code.co_firstlineno))


def _index_of(stream: Stream) -> str:
    """The statement that made the index of the first batch's rows."""
    return index(stream.evidence.shared(DataLines.of).chosen())


def _shuffled(stream: Stream) -> Iterator[Finding]:
    """A shuffle that gives the same order in every epoch."""
    source, reading, epochs = stream.source, stream.reading, stream.epochs
    given = source.given and stream.is_loader
    kept = next((p for p in reading.passes if p.given_again and not p.ascending and p.rows >= LEAST_ROWS), None)
    if kept is not None:
        facts: dict[str, Any] = {"rows": kept.rows, "drawn": kept.draws[-1][0], "trained": False}
        facts["change"] = only_call(str(kept.place), "cycle") or str(kept.place)
        yield found("shuffled_alike", kept, ("cycle()",), "cycle", **facts)
        return
    own = stream.is_loader and source.begin_epoch is None
    path, setter = epoch_setter(stream.now.of) if own else ("", None)
    in_order = _in_one_order(reading, epochs)
    if path and in_order and _reacts(stream, setter):
        if "set_epoch" not in ReachableObjects.by_fit(stream.streams.loop).names:
            in_fit = len(next(iter(_in_own_epochs(stream)), [])) if given else 0
            facts = {"rows": epochs[0].rows, "epochs": len(epochs), "in_fit": in_fit, "path": path}
            facts |= {"level": "fault" if in_fit else "advice", "kinds": ("missing call",), "stream": source.name}
            facts["change"] = loop_of(line_of(stream.streams.loop.fit))
            yield found("set_epoch_missing", source, (f"{path}.set_epoch()",), repair=_sets(path), **facts)
    elif in_order and epochs[0].draws and all(epoch.draws == epochs[0].draws for epoch in epochs):
        drawn, sampler = epochs[0].draws[-1][0], next((one.sampler for one in reading.passes), "")
        facts = {"rows": epochs[0].rows, "epochs": len(epochs), "drawn": drawn, "sampler": sampler}
        order = type(getattr(source.of, "sampler", None)) if stream.is_loader else None
        drawn_at = loop_of(line_of(getattr(order, "__iter__", None)))
        facts["change"] = source_of_draws(drawn_at) or drawn_at
        yield found("shuffled_alike", source, (sampler or drawn,), stream=source.name, **facts)
    elif given and any(e.draws for e in epochs) and ReachableObjects.by_fit(stream.streams.loop).names & RESEEDING:
        yield from map(_same_order_each_epoch, _in_own_epochs(stream))


def _sets(path: str) -> str:
    return f"loader.{path}.set_epoch(epoch) at the start of each epoch"


def _in_one_order(reading: Reading, epochs: Sequence[Epoch]) -> bool:
    """Whether the epochs came in one and the same order, which is not that of the data set."""
    if len(epochs) < 2:
        return False
    if all(epoch.order is not None for epoch in epochs):
        enough = epochs[0].rows >= LEAST_ROWS or reading.passes[0].rows >= LEAST_ROWS
        return enough and not epochs[0].ascending and len({epoch.order for epoch in epochs}) == 1
    name = reading.identity
    if not name or any(name not in epoch.leaves for epoch in epochs):
        return False
    return len({epoch.column(name) for epoch in epochs}) == 1 and len(set(epochs[0].column(name))) >= LEAST_ROWS


def _reacts(stream: Stream, setter: Any) -> bool:
    """Whether ``set_epoch`` changes the order."""

    def work(_out_of_time: Callable[[], bool]) -> Reading:
        setter.set_epoch(7)
        return read(lambda: stream.now.of, axis=stream.streams.axis, pads=stream.streams.pads, epochs=1)

    again = stream.streams.guarded(work)
    first = stream.reading.epochs[0]
    return again.raised is None and not _in_one_order(stream.reading, [first, again.epochs[0]])


def _begins_again(stream: Stream) -> bool:
    """Whether ``fit`` begins the loader again for each of its steps, and so takes its first batch each time: a loader
    that gives its batches in one order, and has several."""
    if not (stream.source.given and stream.is_loader) or len(stream.reading.epochs[0].batches) < 2:
        return False
    if any(e.draws for e in stream.epochs) or not all(e.ascending for e in stream.reading.epochs):
        return False
    record = stream.evidence.run()
    return len(record.passes) > 2 and set(record.passes) == {1} and record.steps > 2


def last_batch(stream: Stream) -> Iterator[Finding]:
    """A whole epoch ends with a batch of fewer rows than all others, which are of one size: ``fit`` raises on it and a
    full batch in turn, and not on full ones alone."""
    source, epoch, evidence = stream.source, stream.reading.epochs[0], stream.evidence
    batch_sampler = source.of.batch_sampler if stream.is_loader else None
    if not source.given or source.kind == "function" or getattr(batch_sampler, "drop_last", False):
        return
    *full, last = sizes(epoch.batches)
    if not (epoch.complete and len(set(full)) == 1 and 0 < last < full[0] and "fit" in evidence.offers):
        return

    def ends(loop: TrainLoop) -> list[Any]:
        with generators_kept(loop):
            batches = list(itertools.islice(in_this_process(loop.batches), MOST_BATCHES))
        return [batches[0], batches[-1]]

    how: dict[str, Any] = {"enough": lambda record: record.rounds >= COMPARED_STEPS, "may_raise": True}
    raised = evidence.rerun(stream=lambda loop: itertools.cycle(ends(loop)), **how).raised
    if raised is None or raised.place.code.startswith(("raise", "assert ")):  # the project's own check
        return
    if evidence.rerun(stream=lambda loop: itertools.cycle(ends(loop)[:1]), **how).raised is None:
        variant = "batch sampler" if batch_sampler is not None and source.of.batch_size is None else ""
        facts = {"rows": last, "size": full[0], "raised": raised.summary, "stream": source.name}
        facts |= {"smallest": count(last, "row"), "sampler": type(batch_sampler).__name__}
        culprit = "DataLoader" if stream.is_loader else source.name
        yield found("last_batch_raises", raised, (culprit,), variant, **facts)


# Labels


def labels_reordered(stream: Stream) -> Iterator[Finding]:
    """Two leaves that hold the same rows in two epochs, and not the same pairs of them."""
    x, y, changed = _other_pairs(stream.reading.identity, stream.epochs)
    if not y or not (_by_no_chance(x, y, stream.epochs) or _by_no_chance(x, y, _further_epochs(stream))):
        return
    first, source = stream.epochs[0], stream.source
    inputs, labels, rows = pair_stored(stream.held, first, x, y)
    sure = rows > 0 and source.as_trained and is_target(stream.evidence, y)
    facts: dict[str, Any] = {"inputs": x, "labels": y, "rows": first.rows, "changed": changed, "stream": source.name}
    facts |= {"kinds": ("input",) * 2, "stored": rows, "stored_inputs": inputs, "stored_labels": labels}
    yield found("labels_apart", source, (x, y), level="fault" if sure else "advice", **facts)


def _other_pairs(x: str, epochs: Sequence[Epoch]) -> tuple[str, str, int]:
    for first, second in itertools.islice(itertools.combinations(epochs, 2), 8):
        leaves = [path for path in first.leaves if path in second.leaves]
        for y in leaves if x in leaves else ():
            whole = [batch[y].digests for batch in first.batches[:-1]]
            numbers = len(whole) > 1 and len(set(map(frozenset, whole))) == 1 and len(set(whole[0])) == len(whole[0])
            if y == x or numbers or len(set(first.column(y))) < 2:  # the numbers of a batch's rows are no labels
                continue
            mine, other = _pairs(first, x, y), _pairs(second, x, y)
            if mine == other or any(Counter(p[i] for p in mine) != Counter(p[i] for p in other) for i in (0, 1)):
                continue
            # another leaf may give each row its own: then this one gives it those of others, as negatives are drawn
            values = Counter(first.column(y))
            own = (z for z in leaves if z not in (x, y) and Counter(first.column(z)) == values)
            if not any(_pairs(first, x, z) == _pairs(second, x, z) for z in own):
                known = dict(other.elements())
                return x, y, sum(known.get(row) != label for row, label in mine.elements())
    return x, "", 0


def _pairs(epoch: Epoch, x: str, y: str) -> Counter[tuple[int, int]]:
    return Counter(zip(epoch.column(x), epoch.column(y), strict=True))


def _by_no_chance(x: str, y: str, epochs: Sequence[Epoch]) -> bool:
    """Whether all of these epochs hold the same rows and labels, in pairs that randomly drawn labels would not give."""
    bits = 0.0
    for epoch in epochs[1:]:
        if any(Counter(epochs[0].column(path)) != Counter(epoch.column(path)) for path in (x, y)):
            return False
        known = dict(zip(epochs[0].column(x), epochs[0].column(y), strict=True))
        pairs = zip(epoch.column(x), epoch.column(y), strict=True)
        bits += unlikely([known[row] for row, label in pairs if known[row] != label])
    return bits >= ENOUGH


def unlikely(labels: Sequence[int]) -> float:
    """By how many bits it is unlikely that labels drawn at random from these are as many of each kind: of ``m`` rows,
    where ``c_i`` have label ``i``, they are so with probability ``m! prod((c_i / m)^c_i / c_i!)``."""
    rows, counts = len(labels), Counter(labels).values()
    ways = math.lgamma(rows + 1) - sum(math.lgamma(count + 1) for count in counts)
    return -(ways + sum(count * math.log(count / rows) for count in counts)) / math.log(2)


def _further_epochs(stream: Stream) -> list[Epoch]:
    streams, source = stream.fresh()
    more = streams.read(source, times=MORE)
    return more.cycles() if more.raised is None else []


def leaves_equal(stream: Stream) -> Iterator[Finding]:
    """Two of three leaves of one shape that are equal in every row, and the third."""
    epoch = stream.reading.epochs[0]
    first = epoch.batches[0]
    floating = [name for name in epoch.leaves if first[name].floating and first[name].elements > 1]
    if len(floating) != 3 or len({(first[name].shape, first[name].dtype) for name in floating}) > 1:
        return
    columns = {name: epoch.column(name) for name in floating}
    for a, b in itertools.combinations(floating, 2):
        third = next(name for name in floating if name not in (a, b))
        if columns[a] == columns[b] != columns[third] and len(set(columns[a])) > 1:
            facts: dict[str, Any] = {"a": a, "b": b, "third": third, "rows": epoch.rows}
            yield found("leaves_alike", stream.source, (a, b), level="advice", kinds=("input",) * 2, **facts)
            return


# While ``fit`` trains


class PassesInRun(LoaderPasses):
    """The passes over DataLoaders in a run that is made in its ``contexts``, and the records of its loop at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[Finding] = []
        self._lists: dict[int, tuple[Any, int]] = {}
        self.loop: TrainLoop | None = None
        self._watch: Watch | None = None

    @classmethod
    def of(cls, _evidence: Evidence) -> PassesInRun:
        """What an observed run showed; of a loop that can be run again nothing is seen by itself."""
        return cls()

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What an observed run is made in."""
        return (*self.around_fit(watch), self.from_building())

    def from_building(self) -> contextlib.AbstractContextManager[None]:
        """What a run is made in that makes iterators before ``fit``: ``itertools.cycle(loader)``."""
        return self.noting(
            steps=lambda: 0 if self._watch is None else self._watch.record.steps,
            ignored=lambda: self._watch is not None and self._watch.is_suspended,
        )

    def around_fit(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What ``fit`` is made in, inside of ``from_building``."""
        self._watch = watch
        return (self._taking_slots(),)

    def note_lists(self, number: int, _item: Any = None) -> None:
        """Keep what lists hold that several records share, before ``fit`` and at some of its batches."""
        if self.loop is not None and number in (-1, 2, 5):
            self._lists.update(shared_lists(ReachableObjects.by_fit(self.loop)))

    @contextlib.contextmanager
    def _taking_slots(self) -> Iterator[None]:
        self.note_lists(-1)
        try:
            yield
        finally:
            loop, self.loop = self.loop, None
            if loop is not None:
                self.slots = list(shared_slots(ReachableObjects.by_fit(loop), loop, self._lists))


def _passes_in_fit(evidence: Evidence, *, over: int = 0, longest: int = 0) -> PassesInRun:
    """Run ``fit`` with its loaders watched. With ``over``, the batches of an epoch of the loader that is given as
    ``batches=``, ``fit`` iterates that loader itself, as in the project. With ``longest``, the batches of an epoch of
    its own loader, the run goes on for two of these."""
    seen, plan = PassesInRun(), evidence.plan()

    def fit(loop: TrainLoop) -> Callable[[Any], Any]:
        seen.loop = loop
        run = fit_of(loop)

        def over_its_own(batches: Any) -> None:
            next(iter(batches), None)
            run(in_this_process(loop.batches))

        return over_its_own if over else run

    most = 2 * max(over, longest) + 2
    if most > 2:
        plan = replace(plan, count=most, enough=lambda record: record.rounds >= most)
    plan = replace(plan, fit=fit, around=seen.from_building, contexts=seen.around_fit, may_raise=True)
    evidence.rerun(plan, before_item=seen.note_lists)
    return seen


def _in_own_epochs(stream: Stream) -> list[list[Pass]]:
    """What ``fit`` does over the epochs of the loader itself, where they are short enough to be run."""
    batches = len(stream.reading.epochs[0].batches)
    if not 1 < batches <= MOST_IN_FIT:
        return []
    return _repeated(_passes_in_fit(stream.evidence, over=batches).passes)


def _repeated(passes: Sequence[Pass]) -> list[list[Pass]]:
    """The passes over each loader that was iterated to its end twice or more while the loop trained on it, for which
    equal orders were drawn; the one pass that ``itertools.cycle`` gave again."""
    repeated = []
    for number in dict.fromkeys(one.loader for one in passes):
        own = [one for one in passes if one.loader == number and one.indexed and one.complete and one.trained]
        own = [one for one in own if one.rows >= LEAST_ROWS]
        if not own or own[0].ascending or not own[0].draws:
            continue
        if any(one.given_again for one in own):
            repeated.append(own[:1])
        elif len(own) > 1 and all((one.order, one.draws) == (own[0].order, own[0].draws) for one in own):
            repeated.append(own)
    return repeated


def _same_order_each_epoch(passes: Sequence[Pass]) -> Finding:
    """A loader that the loop trained on in one order."""
    first = passes[0]
    facts: dict[str, Any] = {"rows": first.rows, "drawn": first.draws[-1][0]}
    if len(passes) == 1:
        facts["change"] = only_call(str(first.place), "cycle") or str(first.place)
        return found("shuffled_alike", first, ("cycle()",), "cycle in fit", trained=True, **facts)
    facts |= {"epochs": len(passes), "sampler": first.sampler}
    if not first.set_epoch:
        return found("shuffled_alike", first, (first.sampler,), "in fit", **facts)
    facts |= {"kinds": ("missing call",), "repair": _sets(first.set_epoch)}
    return found("set_epoch_missing", first, (f"{first.set_epoch}.set_epoch()",), "in fit", **facts)


def in_fit(evidence: Evidence, streams: Streams) -> tuple[list[Finding], bool]:
    """What loaders and records of the loop itself show, for which it is run once more; whether it trained on any."""
    held = ReachableObjects.by_fit(streams.loop)
    given = {id(source.of) for source in streams.sources if source.trains}
    makes_loaders = any(name.endswith("DataLoader") for name in held.names)
    fills_records = held.names & SAMPLING and held.names & FILLING
    if not (
        makes_loaders or fills_records or held.cycles or any(id(loader) not in given for _, loader in held.loaders)
    ):
        return [], False
    seen = _passes_in_fit(evidence)
    repeated = _repeated(seen.passes)
    once = [one for one in seen.passes if one.trained and one.draws and not one.ascending]
    if not repeated and once and sum(one.complete for one in once) < 2:
        lengths = [*(len(one.steps_at) for one in once), *(length(loader) for _, loader in held.loaders)]
        if max(lengths) <= MOST_IN_FIT:
            repeated = _repeated(_passes_in_fit(evidence, longest=max(lengths)).passes)
    return [*map(_same_order_each_epoch, repeated), *seen.slots], any(one.trained for one in seen.passes)


def observed(evidence: Evidence) -> Iterator[Finding]:
    """What one run shows that cannot be made again."""
    seen = evidence.shared(PassesInRun.of)
    if not any(one.complete and one.trained for one in seen.passes):
        raise CannotDecide(
            "no DataLoader was iterated to its end while training: observe a whole epoch, or return a TrainLoop with "
            "the DataLoader as batches= from a marked test",
            needs="batches=",
        )
    yield from map(_same_order_each_epoch, _repeated(seen.passes))
