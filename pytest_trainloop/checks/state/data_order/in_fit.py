"""The loaders that ``fit`` iterates itself, between whose batches optimizer steps happen."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from pytest_trainloop import members
from pytest_trainloop.checks.state.data_order.held import Held
from pytest_trainloop.checks.state.data_order.passes import LoaderPasses
from pytest_trainloop.checks.state.data_order.stored import SharedSlot, shared_slots
from pytest_trainloop.checks.state.data_order.streams import LEAST_ROWS
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop.checks.state.data_order.passes import Pass
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST_BATCHES = 50
"""Batches of an epoch that ``fit`` is run over twice, at most."""

RESEEDING = frozenset({"manual_seed", "seed_everything", "set_seed", "seed_all", "set_rng_state"})
"""What code that reseeds torch calls: its samplers draw with torch."""

SAMPLING = frozenset({"sample", "choice", "choices", "randint", "randperm", "multinomial", "permutation"})
FILLING = frozenset({"append", "appendleft", "extend", "push", "add", "store"})


class PassesInRun(LoaderPasses):
    """The passes over DataLoaders in a run that is made in its ``contexts``."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[SharedSlot] = []
        self._loop: TrainLoop | None = None

    @classmethod
    def of(cls, _evidence: Evidence) -> PassesInRun:
        """What an observed run showed; of a loop that can be run again nothing is seen by itself."""
        return cls()

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What the run is made in."""
        return (self._around(watch),)

    @contextlib.contextmanager
    def _around(self, watch: Watch) -> Iterator[None]:
        with self.noting(steps=lambda: watch.record.steps, ignored=lambda: watch.is_suspended):
            try:
                yield
            finally:
                self._look_at_records()

    def keep(self, loop: TrainLoop) -> TrainLoop:
        """Look at the records of this loop at the end of its run."""
        self._loop = loop
        return loop

    def _look_at_records(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            self.slots = shared_slots(held_by_fit(loop), own_tensors(loop))


def own_tensors(loop: TrainLoop) -> set[int]:
    """The tensors of the declared modules, by ``id``."""
    modules = loop.modules.values()
    return {id(t) for module in modules for t in (*members.parameters(module), *members.buffers(module))}


def held_by_fit(loop: TrainLoop) -> Held:
    """What the project's loop holds."""
    return Held.by(*((name, f) for name, f in (("fit", loop.fit), ("step", loop.step)) if f is not None))


def makes_loaders(held: Held) -> bool:
    """Whether the loop's code names a DataLoader, which it then makes."""
    return any(name.endswith("DataLoader") for name in held.names)


def fills_records(held: Held) -> bool:
    """Whether the loop may fill a buffer that it samples from."""
    return bool(held.names & SAMPLING and held.names & FILLING)


def reseeds(held: Held) -> bool:
    """Whether the loop's code names what seeds generators."""
    return bool(held.names & RESEEDING)


def passes_in_fit(evidence: Evidence, *, over: int = 0, longest: int = 0) -> PassesInRun:
    """Run ``fit`` with its loaders watched. With ``over``, the batches of an epoch of the loader that is given as
    ``batches=``, ``fit`` iterates that loader itself, as in the project. With ``longest``, the batches of an epoch of
    its own loader, the run goes on for two of these."""
    found, plan = PassesInRun(), evidence.plan()

    def fit(loop: TrainLoop) -> Callable[[Any], Any]:
        run = fit_of(found.keep(loop))
        return (lambda batches: _over_its_own(run, loop, batches)) if over else run

    most = 2 * max(over, longest) + 2
    if most > 2:
        plan = replace(plan, count=most, enough=lambda record: record.rounds >= most)
    evidence.rerun(replace(plan, fit=fit, contexts=found.contexts, may_raise=True))
    return found


def _over_its_own(run: Callable[[Any], Any], loop: TrainLoop, batches: Any) -> None:
    next(iter(batches), None)
    loader = loop.batches
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.num_workers, loader.timeout = 0, 0
    run(loader)


@dataclass(frozen=True, slots=True)
class Repeated:
    """A loader whose passes came in one order."""

    where: str
    sampler: str
    epochs: int
    rows: int
    drawn: str
    set_epoch: str
    by_cycle: bool = False


def repeated(passes: Sequence[Pass]) -> list[Repeated]:
    """The loaders that were iterated to their end twice or more while the loop trained on them, for which equal orders
    were drawn; and those whose one pass ``itertools.cycle`` gave again."""
    found = []
    for number in dict.fromkeys(one.loader for one in passes):
        whole = [
            p for p in passes if p.loader == number and p.indexed and p.complete and p.trained and p.rows >= LEAST_ROWS
        ]
        first = next(iter(whole), None)
        if first is None or first.ascending or not first.draws:
            continue
        drawn = first.draws[-1][0]
        if any(p.given_again for p in whole):
            found.append(Repeated(first.where, first.sampler, 2, first.rows, drawn, "", by_cycle=True))
        elif len(whole) > 1 and all((p.order, p.draws) == (first.order, first.draws) for p in whole):
            found.append(Repeated(first.where, first.sampler, len(whole), first.rows, drawn, first.set_epoch))
    return found


def require_seen(found: PassesInRun) -> None:
    """Raise ``CannotDecide`` where no loader was iterated twice in a run that cannot be repeated."""
    if not any(p.complete and p.trained for p in found.passes):
        raise CannotDecide(
            "no DataLoader was iterated to its end while training: observe a whole epoch, or return a TrainLoop with "
            "the DataLoader as batches= from a marked test",
            needs="batches=",
        )
