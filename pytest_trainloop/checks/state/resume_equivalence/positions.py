"""Whether the data go on where they stopped, of a loop whose checkpoint holds how far they have come.

No step is made. Batches are taken until rows come again: that is an epoch. Two loops are saved in the middle of the
first one and of the second, and each is loaded into a fresh one. Where the batches go on after the first and not after
the second, ``load`` forgets what changes between epochs. Many projects begin an epoch again: nothing is said of those.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.resume_equivalence.causes import found
from pytest_trainloop.checks.state.resume_equivalence.checkpoint import Checkpoint
from pytest_trainloop.checks.state.resume_equivalence.lost import loss_finding
from pytest_trainloop.checks.state.resume_equivalence.runs import rows_in
from pytest_trainloop.checks.state.two_runs import line_of
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.core.wording import some
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.statements import reader_of
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.reachable_state.snapshot import Difference, Reach, differences
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed, Uninterrupted
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop

MOST_BATCHES = 64
"""Batches of an epoch that are taken."""

EPOCHS = 2
"""Epochs of a run that is resumed in the middle of one."""

Batch = list[torch.Tensor]

GOES_ON = 104_743
"""Added to the seed after the cut: an order that is drawn there is another one."""


def data_go_on(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    loop, loaded = a.evidence.fresh_loop(), b.loaded
    if loaded is None or a.checkpoint.random_states:
        return
    given = differences(b.built, loaded)
    if numbers := [d for d in given if d.leaf.path in b.set_equal and type(d.after) is int and d.after > 0]:
        yield from _later_epochs(a, numbers)
    if not isinstance(loop.batches, Callable) or not any(map(of_data, given)):  # type: ignore[arg-type]
        return
    facts: dict[str, Any] = {}
    try:
        with preserved():
            epoch = _epoch(_taken(_batches(loop, MOST_BATCHES, a.seed), MOST_BATCHES))
        if epoch < 2:
            return
        first, second = epoch // 2, epoch + epoch // 2
        own, other, left = _resumed(a, first, 2 * epoch)
        whole, later = (_epoch(batches[epoch - first :]) for batches in (own, other))
        if not _others(own[: epoch - first], other) and 0 < later < epoch and not 0 < whole < epoch:
            facts = {"skipped": epoch - later, "epoch": epoch}
        elif not _others(own[:epoch], other):
            own, other, left = _resumed(a, second, epoch)
            facts = {"others": _others(own, other), "epoch": epoch, "first": first, "second": second}
    except Exception as error:  # of the project's data, save and load
        reraise_ours(error)
        return
    if "skipped" in facts:
        yield _cut_short(a, left, facts)
    elif facts.get("others"):
        what = some(tuple(dict.fromkeys(d.leaf.component for d in left)))
        yield loss_finding(a, b, "state_lost", left, "position", what=what, **facts)


def _later_epochs(a: Uninterrupted, numbers: list[Difference]) -> Iterator[Finding]:
    """Epochs of one ``fit`` in a loop that ``load`` gives these numbers, which no training moves: the batch to begin at
    is for the first of them alone."""
    plain, resumed = _first_steps(a, load=False), _first_steps(a, load=True)
    if len(plain) == EPOCHS == len(resumed) and plain[0] == plain[1] < resumed[0] == resumed[1]:
        skipped = resumed[0] - plain[0]
        # not a rule of the project's for a later epoch
        if kept := [d for d in numbers if skipped in (d.after - 1, d.after, d.after + 1, d.after * plain[0])]:
            facts: dict[str, Any] = {"skipped": skipped, "epoch": EPOCHS * a.made.items}
            yield _cut_short(a, kept, facts)


def _cut_short(a: Uninterrupted, kept: list[Difference], facts: dict[str, Any]) -> Finding:
    loop, paths = a.evidence.fresh_loop(), [d.leaf.path for d in kept]
    names = [re.sub(r"\W+", "", path.rpartition("[")[2].rpartition(".")[2]) for path in paths]
    lines = (reader_of(line_of(function), name) for function in (loop.fit, loop.batches) for name in names)
    change = next(filter(None, lines), "")
    return found("later_epochs_cut_short", a.lines["load"], paths, change=change, **facts)


def _first_steps(a: Uninterrupted, *, load: bool) -> list[int]:
    """How many batches of each epoch are taken when its first optimizer step is made."""
    taken: list[int] = []
    passes: list[int] = []

    def fit(loop: TrainLoop) -> Callable[[Any], Any]:
        if load:
            a.checkpoint.give(loop)

        def run(batches: Any) -> None:
            nonlocal passes
            passes = batches.passes
            fit_of(loop)(batches)

        return run

    def stepped(*_step: Any) -> None:
        taken.extend(passes[len(taken) :])

    given = {"count": EPOCHS * a.made.items, "read_ahead": None, "may_raise": True}
    enough = lambda record: len(taken) >= EPOCHS  # noqa: E731
    with contextlib.suppress(CannotDecide):  # the last epoch may be over after load
        a.evidence.rerun(contexts=lambda watch: (hooked(after_steps(stepped)),), fit=fit, enough=enough, **given)
    return taken[:EPOCHS]


def of_data(difference: Difference) -> bool:
    return "batches" in difference.leaf.reached_from and difference.leaf.kind in ("scalar", "tensor", "array", "length")


def rows_given(loop: TrainLoop, most: int | None = 1) -> set[int]:
    """The rows of so many tensors of the first batches; batches without tensors count as one row each."""
    batches = [(batch, list(nested.tensors(batch))) for batch in first_batches(loop, MOST_BATCHES)]
    plain = {hash(repr(batch)) for batch, tensors in batches if not tensors}
    return plain | {row for _, tensors in batches for tensor in tensors[:most] for row in rows_in(tensor)}


def _batches(loop: TrainLoop, count: int, seed: int) -> Any:
    seed_all(seed)
    batches: Any = loop.batches
    return batches(count)


def _taken(batches: Any, count: int) -> list[Batch]:
    return [[t.detach().clone() for t in nested.tensors(batch)] for batch in itertools.islice(batches, count)]


def _epoch(batches: list[list[torch.Tensor]]) -> int:
    """The number of batches until a row comes again; 0 where none does."""
    seen: set[int] = set()
    for number, tensors in enumerate(batches):
        rows = {row for tensor in tensors[:1] for row in rows_in(tensor)}
        if not seen.isdisjoint(rows):
            return number
        seen |= rows
    return 0


def _resumed(a: Uninterrupted, position: int, count: int) -> tuple[list[Batch], list[Batch], list[Difference]]:
    """The batches after this position, those of a resumed loop, and what of the data differs there."""
    loop, fresh, checkpoint = a.evidence.fresh_loop(), a.evidence.fresh_loop(), Checkpoint()
    with preserved():
        begun = _batches(a.evidence.fresh_loop(), 1, a.seed)
        goes_on = isinstance(begun, Iterator)  # what gives a list has moved on by all of it
        begun = _batches(loop, position + count * goes_on, a.seed)
        _taken(begun, position)
        try:
            with preserved():
                checkpoint.take(loop)
                checkpoint.give(fresh)
        finally:
            checkpoint.remove()
        left = [d for d in differences(Reach.of(loop).snapshot(), Reach.of(fresh).snapshot()) if of_data(d)]
        seed_all(a.seed + GOES_ON)
        own = _taken(begun if goes_on else _batches(loop, count, a.seed + GOES_ON), count)
        return own, _taken(_batches(fresh, count, a.seed + GOES_ON), count), left


def _others(own: list[Batch], other: list[Batch]) -> int:
    """How many of these batches are others in a resumed loop."""
    return sum(len(x) != len(y) or not all(map(torch.equal, x, y)) for x, y in zip(own, other, strict=False))
