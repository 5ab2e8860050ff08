"""The looks at the streams of a loop: each gives findings, and notes why where it cannot.

A stream is read on a loop of its own, and each further look that runs the project's code for data gets another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.state.data_order import findings, in_fit, items, order, stored, workers
from pytest_trainloop.checks.state.data_order.collated import collated_apart
from pytest_trainloop.checks.state.data_order.fed import is_target
from pytest_trainloop.checks.state.data_order.held import Held
from pytest_trainloop.checks.state.data_order.last_batch import is_smaller, last_raises
from pytest_trainloop.checks.state.data_order.passes import epoch_setter
from pytest_trainloop.checks.state.data_order.sources import (
    Source,
    Streams,
    drops_all,
    guarded,
    keep_last,
    some_batches,
    some_indices,
)
from pytest_trainloop.checks.state.data_order.streams import (
    DRAWN,
    MOST_BATCHES,
    Epoch,
    Reading,
    epochs_of,
    in_this_process,
    read,
)
from pytest_trainloop.errors import CannotDecide, UserCodeError
from pytest_trainloop.runs.user_traceback import user_error
from pytest_trainloop.whose import present, reraise_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

NEW_ROWS = (
    "no row comes twice in 48 batches (augmented or made on the fly); give the DataLoader itself as batches= to have "
    "its data set and sampler judged"
)
LISTED = "the batches are a list, which has no order of its own: give the DataLoader that they come from as batches="
MORE = 5
"""How many times as many epochs are read where two hold the same labels in other pairs."""

UNTOLD = "rows cannot be told: give batch_dim="


@dataclass(slots=True)
class Looks:
    """All looks at one loop."""

    evidence: Evidence
    undecided: list[CannotDecide] = field(default_factory=list)
    judged: int = 0
    """Streams of which something was seen."""

    def findings(self) -> Iterator[Finding]:
        """What is wrong, stream by stream."""
        streams = Streams.of(self.evidence)
        for number, source in enumerate(streams.sources):
            if source.kind == "loader" and (dropped := drops_all(source.of)) is not None:
                self.judged += 1
                yield findings.no_batch(source, dropped)
                continue
            yield from self._at(number, source)
        try:
            yield from self._in_fit(streams)
        except CannotDecide as reason:
            # Nothing can be run where the given loader gives no batch, and that is told above.
            self.undecided.append(reason)

    def _at(self, number: int, source: Source) -> Iterator[Finding]:
        """The looks at one stream, whose number is that of the same stream of each fresh loop."""
        try:
            reading, streams = self._read(number, source)
        except CannotDecide as reason:
            self.undecided.append(reason)
            return
        now = streams.sources[number]
        if not reading.epochs[0].batches:
            return
        if not reading.identity:
            self.undecided.append(CannotDecide(UNTOLD, needs="batch_dim="))
            return
        epochs = epochs_of(reading)
        seen = source.kind != "list" and (bool(epochs) or order.some_row_twice(reading))
        if source.kind == "list":
            self.undecided.append(CannotDecide(LISTED, needs="batches="))
        elif not seen and source.kind != "loader":
            self.undecided.append(CannotDecide(NEW_ROWS, needs="batches="))
        self.judged += seen or source.kind == "loader"
        yield from self._of_order(now, streams, reading, epochs)
        yield from self._of_labels(number, now, reading, epochs)
        yield from self._of_stored(now, streams, reading)
        for look in (self._of_items, self._of_workers, self._of_last):
            try:
                yield from look(number, source, reading)
            except CannotDecide as reason:
                self.undecided.append(reason)

    def _read(self, number: int, source: Source) -> tuple[Reading, Streams]:
        """Two epochs of the stream, on a loop of its own and in this process; the last batch of a loader is kept.

        Where that raises the stream is read as it is. Raises ``UserCodeError`` where this raises in the first epoch of
        data that the project gave as ``batches=``, ``CannotDecide`` of other data.
        """
        for as_it_is in (False, True):
            streams = Streams.of(self.evidence)
            now = streams.sources[number]
            changed = not as_it_is and _prepare(now)
            reading = self._epochs(streams, now)
            if reading.raised is None or len(reading.epochs) > 1:
                if len(reading.epochs) > 1 and reading.raised is not None:
                    reading.epochs.pop()
                return reading, streams
            if not changed:
                break
        raised = present(reading.raised, "what reading raised")
        if source.given and source.kind == "loader":
            raise UserCodeError(user_error(raised, f"reading batch {reading.at} of {source.name}"), one_check=True)
        raise CannotDecide(
            f"reading batch {reading.at} of {source.name} raises {type(raised).__name__}: "
            f"{str(raised).strip().partition(chr(10))[0][:160]}"
        )

    def _epochs(self, streams: Streams, source: Source, times: int = 1) -> Reading:
        """Two epochs, or ``times`` as many; of a function as many times as many batches."""

        def work(out_of_time: Callable[[], bool]) -> Reading:
            drawn = DRAWN * times
            return read(
                source.epochs(drawn),
                axis=streams.axis,
                pads=streams.pads,
                epochs=2 * times,
                most=drawn if source.kind == "function" else MOST_BATCHES,
                out_of_time=out_of_time,
            )

        return guarded(self.evidence, streams.loop, work)

    def _of_order(self, source: Source, streams: Streams, reading: Reading, epochs: list[Epoch]) -> Iterator[Finding]:
        if source.trains and (kept := order.kept_by_cycle(reading.passes)) is not None:
            yield findings.kept_by_cycle(source, kept)
        elif source.trains:
            yield from self._of_shuffle(source, streams, reading, epochs)
        if source.kind == "list":
            pass
        elif self._begins_anew(source, reading, epochs):
            yield findings.first_batch_only(source, len(reading.epochs[0].batches))
        elif source.trains and (count := order.one_batch(reading)) and not _given_whole(source):
            yield findings.one_batch_only(source, count)
        elif (times := order.repeats(reading)) > 1:
            yield findings.batch_repeats(source, times)
        if source.trains and (blocks := order.one_label_a_batch(epochs)) is not None:
            yield findings.one_label_a_batch(source, blocks)
        if (names := order.leaves_alike(reading)) is not None:
            yield findings.leaves_alike(source, names, reading.epochs[0].rows)

    def _of_shuffle(self, source: Source, streams: Streams, reading: Reading, epochs: list[Epoch]) -> Iterator[Finding]:
        ours = source.kind == "loader" and source.begin_epoch is None
        path, setter = epoch_setter(source.of) if ours else ("", None)
        fit = in_fit.held_by_fit(streams.loop)
        length = len(reading.epochs[0].batches)
        if path and order.in_one_order(reading, epochs) and self._reacts(source, streams, reading, setter):
            if "set_epoch" not in fit.names:
                in_epochs = self._in_own_epochs(length) if source.given else []
                yield findings.set_epoch_missing(source, path, epochs, next(iter(in_epochs), None))
        elif times := order.alike(reading, epochs):
            yield findings.shuffled_alike(source, reading, epochs, times)
        elif source.given and source.kind == "loader" and in_fit.reseeds(fit) and any(e.draws for e in epochs):
            for repeated in self._in_own_epochs(length):
                yield findings.repeated_in_fit(repeated)

    def _begins_anew(self, source: Source, reading: Reading, epochs: list[Epoch]) -> bool:
        """Whether ``fit`` begins the loader again for each of its steps, and so takes its first batch each time: a
        loader that gives its batches in one order, and has several."""
        if not (source.given and source.kind == "loader") or len(reading.epochs[0].batches) < 2:
            return False
        if any(epoch.draws for epoch in epochs) or not all(epoch.ascending for epoch in reading.epochs):
            return False
        record = self.evidence.run()
        return len(record.passes) > 2 and set(record.passes) == {1} and record.steps > 2

    def _reacts(self, source: Source, streams: Streams, reading: Reading, setter: Any) -> bool:
        """Whether ``set_epoch`` changes the order."""

        def work(_out_of_time: Callable[[], bool]) -> Reading:
            setter.set_epoch(7)
            return read(lambda: source.of, axis=streams.axis, pads=streams.pads, epochs=1)

        again = guarded(self.evidence, streams.loop, work)
        if again.raised is not None:
            return False
        return not order.in_one_order(reading, [reading.epochs[0], again.epochs[0]])

    def _in_own_epochs(self, length: int) -> list[in_fit.Repeated]:
        """What ``fit`` does over the epochs of the loader itself, where they are short enough to be run."""
        if not 1 < length <= in_fit.MOST_BATCHES:
            return []
        return in_fit.repeated(in_fit.passes_in_fit(self.evidence, over=length).passes)

    def _of_labels(self, number: int, source: Source, reading: Reading, epochs: list[Epoch]) -> Iterator[Finding]:
        apart = order.labels_apart(reading, epochs)
        if apart is None or not self._comes_apart_again(number, apart, epochs):
            return
        pair = stored.pair_stored(_held(source), epochs[0], apart.inputs, apart.labels)
        sure = pair is not None and source.as_trained and is_target(self.evidence, apart.labels)
        yield findings.labels_apart(source, apart, pair, "fault" if sure else "advice")

    def _comes_apart_again(self, number: int, apart: order.Apart, epochs: list[Epoch]) -> bool:
        """Whether labels that are drawn anew are ruled out, by further epochs where those that were read do not do."""
        if order.comes_apart_again(apart, epochs):
            return True
        more = self._epochs(streams := Streams.of(self.evidence), streams.sources[number], times=MORE)
        return more.raised is None and order.comes_apart_again(apart, epochs_of(more))

    def _of_stored(self, source: Source, streams: Streams, reading: Reading) -> Iterator[Finding]:
        held = _held(source)
        if source.trains and (never := stored.rows_never_drawn(held, _all(reading), reading.identity)) is not None:
            yield findings.rows_never_drawn(source, never)
        for slot in stored.shared_slots(held, in_fit.own_tensors(streams.loop)):
            yield findings.slots_share_tensor(slot)

    def _of_items(self, number: int, source: Source, _reading: Reading) -> Iterator[Finding]:
        if source.kind != "loader" or workers.is_iterable(source.of):
            return
        streams = Streams.of(self.evidence)
        loader = streams.sources[number].of

        def work(_out_of_time: Callable[[], bool]) -> tuple[Any, Any, Any]:
            few, seed = some_indices(loader)[:3], streams.loop.seed
            changed = items.changed_in_place(loader.dataset, few, seed)
            batches = some_batches(loader) if changed is None else ()
            apart = collated_apart(loader, batches, streams.pads, seed)
            return changed, items.one_noise(loader.dataset, few), apart

        changed, noise, apart = self._of_user(streams, work) or (None, None, None)
        if apart is not None:
            sure = apart.sure and source.as_trained and is_target(self.evidence, apart.labels)
            yield findings.collated_apart(source, loader, apart, "fault" if sure else "advice")
        if changed is not None:
            yield findings.changed_in_place(source, loader.dataset, changed)
        if noise is not None:
            yield findings.one_noise_for_all(source, loader.dataset, noise)

    def _of_workers(self, number: int, source: Source, reading: Reading) -> Iterator[Finding]:
        if source.kind != "loader" or source.of.num_workers < 1:
            return
        streams = Streams.of(self.evidence)
        loader = streams.sources[number].of

        def work(_out_of_time: Callable[[], bool]) -> tuple[Any, Any]:
            if workers.is_iterable(loader):
                return workers.duplicated(loader, reading, axis=streams.axis, pads=streams.pads), None
            index = next(iter(some_indices(loader)), None)
            return None, None if index is None else workers.shared_randomness(loader, index)

        twice, shared = self._of_user(streams, work) or (None, None)
        if twice is not None:
            yield findings.workers_duplicate(source, loader.dataset, twice)
        if shared is not None:
            yield findings.workers_share_randomness(source, shared)

    def _of_user(self, streams: Streams, work: Callable[[Callable[[], bool]], Any]) -> Any:
        """What the work gives; an exception of the project's code ends this look alone."""
        try:
            return guarded(self.evidence, streams.loop, work)
        except CannotDecide as reason:
            self.undecided.append(reason)
        except Exception as error:  # of the project's data set: other indices are not asked for in training
            reraise_ours(error)
        return None

    def _of_last(self, _number: int, source: Source, reading: Reading) -> Iterator[Finding]:
        dropped = source.kind == "loader" and getattr(source.of.batch_sampler, "drop_last", False)
        if not source.given or source.kind == "function" or dropped or "fit" not in self.evidence.offers:
            return
        if is_smaller(reading.epochs[0]) and (last := last_raises(self.evidence, reading.epochs[0])) is not None:
            yield findings.last_batch_raises(source, last)

    def _in_fit(self, streams: Streams) -> Iterator[Finding]:
        """Loaders and records of the loop itself, for which it is run once more."""
        held = in_fit.held_by_fit(streams.loop)
        given = {id(source.of) for source in streams.sources if source.trains}
        own = any(id(loader) not in given for _, loader in held.loaders)
        if not (own or in_fit.makes_loaders(held) or in_fit.fills_records(held)):
            return
        found = in_fit.passes_in_fit(self.evidence)
        once = [p for p in found.passes if p.trained and p.draws and not p.ascending]
        repeated = in_fit.repeated(found.passes)
        if not repeated and len([p for p in once if p.complete]) < 2 and once:
            most = max(len(p.steps_at) for p in once)
            longer = max([most, *(_len(loader) for _, loader in held.loaders)])
            if longer <= in_fit.MOST_BATCHES:
                repeated = in_fit.repeated(in_fit.passes_in_fit(self.evidence, longest=longer).passes)
        self.judged += any(p.trained for p in found.passes)
        for one in repeated:
            yield findings.repeated_in_fit(one)
        for slot in found.slots:
            yield findings.slots_share_tensor(slot)


def _prepare(source: Source) -> bool:
    """Have a loader read in this process, and give its last batch too; whether that changes how it is read."""
    if source.kind != "loader":
        return False
    had_workers = source.of.num_workers > 0
    in_this_process(source.of)
    return keep_last(source.of) or had_workers


def _held(source: Source) -> Held:
    return Held.by(("batches" if source.given else source.name, source.of))


def _given_whole(source: Source) -> bool:
    """Whether a loader has one batch an epoch, which is all its data."""
    return source.kind == "loader" and _len(source.of) == 1


def _len(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return 0


def _all(reading: Reading) -> Epoch:
    """All that was read, as one."""
    return Epoch([batch for epoch in reading.epochs for batch in epoch.batches])


def observed(evidence: Any) -> Iterator[Finding]:
    """What one run shows that cannot be made again."""
    found = evidence.shared(in_fit.PassesInRun.of)
    in_fit.require_seen(found)
    for one in in_fit.repeated(found.passes):
        yield findings.repeated_in_fit(one)
