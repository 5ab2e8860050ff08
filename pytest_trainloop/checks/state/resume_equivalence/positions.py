"""Whether the data go on where they stopped, of a loop whose checkpoint holds how far they have come.

No step is made. Batches are taken until rows come again: that is an epoch. Two loops are saved in the middle of the
first one and of the second, and each is loaded into a fresh one. Where the batches go on after the first and not after
the second, ``load`` forgets what changes between epochs. Many projects begin an epoch again: nothing is said of those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.resume_equivalence.checkpoint import Checkpoint
from pytest_trainloop.checks.state.resume_equivalence.lost import loss_finding
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.core.wording import some
from pytest_trainloop.declare import nested
from pytest_trainloop.recording.samples import raw_bytes
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.reachable_state.snapshot import Difference, Reach, differences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed, Uninterrupted
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop

MOST_BATCHES = 64
"""Batches of an epoch that are taken."""

GOES_ON = 104_743
"""Added to the seed after the cut: an order that is drawn there is another one."""


def data_go_on(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    loop, loaded = a.evidence.fresh_loop(), b.loaded
    if not isinstance(loop.batches, Callable) or loaded is None or a.checkpoint.random_states:  # type: ignore[arg-type]
        return
    if not any(_of_data(d) for d in differences(b.built, loaded)):
        return
    try:
        epoch = _epoch(_taken(loop, MOST_BATCHES, a.seed))
        if epoch < 2:
            return
        first, second = epoch // 2, epoch + epoch // 2
        if _resumed(a, first, epoch)[0]:
            return
        others, left = _resumed(a, second, epoch)
    except Exception as error:  # of the project's data, save and load
        reraise_ours(error)
        return
    if others:
        facts: dict[str, Any] = {"others": others, "epoch": epoch, "first": first, "second": second}
        what = some(tuple(dict.fromkeys(d.leaf.component for d in left)))
        yield loss_finding(a, b, "state_lost", left, "position", what=what, **facts)


def _of_data(difference: Difference) -> bool:
    return "batches" in difference.leaf.reached_from and difference.leaf.kind in ("scalar", "tensor", "array", "length")


def _taken(loop: TrainLoop, count: int, seed: int) -> list[list[torch.Tensor]]:
    with preserved():
        seed_all(seed)
        batches: Any = loop.batches
        given = itertools.islice(batches(count), count)
        return [[t.detach().clone() for t in nested.tensors(batch)] for batch in given]


def _epoch(batches: list[list[torch.Tensor]]) -> int:
    """The number of batches until a row comes again; 0 where none does."""
    seen: set[bytes] = set()
    for number, tensors in enumerate(batches):
        rows = {raw_bytes(row) for row in tensors[0].cpu()} if tensors and tensors[0].ndim else set()
        if not seen.isdisjoint(rows):
            return number
        seen |= rows
    return 0


def _resumed(a: Uninterrupted, position: int, count: int) -> tuple[int, list[Difference]]:
    """How many of the batches after this position are others in a resumed loop, and what of the data differs there."""
    loop, fresh, checkpoint = a.evidence.fresh_loop(), a.evidence.fresh_loop(), Checkpoint()
    try:
        _taken(loop, position, a.seed)
        with preserved():
            checkpoint.take(loop)
            checkpoint.give(fresh)
        left = [d for d in differences(Reach.of(loop).snapshot(), Reach.of(fresh).snapshot()) if _of_data(d)]
        own, other = (_taken(one, count, a.seed + GOES_ON) for one in (loop, fresh))
    finally:
        checkpoint.remove()
    same = [len(x) == len(y) and all(map(torch.equal, x, y)) for x, y in zip(own, other, strict=False)]
    return max(len(own), len(other)) - sum(same), left
