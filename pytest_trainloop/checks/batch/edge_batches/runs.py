"""The batches that an epoch may end with, and runs over them: one row, the loader's last batch, odd rows alone.

Batches are composed of the project's own example by taking rows and cutting time: no value is made up. Each is given
to a fresh loop, again and again, for two steps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.core.wording import be, some
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.padding import Proof, padding_ids, read_paddings
from pytest_trainloop.instruments.batches.valid_targets import rows_without
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients
from pytest_trainloop.instruments.records.finiteness import became_nonfinite
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.nonfinite import NonFiniteOrigins
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here, layer
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.process_state import preserved

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.instruments.compositions.step_runs import Contexts
    from pytest_trainloop.instruments.tracing.nonfinite import NonFiniteOrigin
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

STEPS_OF_A_RUN = 2
"""Optimizer steps of a run: the second is made with what the first has left."""

COMPARED = 3
"""Batches whose widths are compared."""

MOST_ROWS = 1_000_000
"""Rows of a data set whose order is read, at most."""

Compose = Callable[["TrainLoop"], Any]
"""Makes a batch for a fresh loop, where it is none of rows of the example."""

Key = tuple[str, int, int]
"""The file and the instruction of a call, and how many calls came from there before it."""


class Ending:
    """How a loader ends an epoch. Of a loader with an order of its own only ``drops`` is known."""

    def __init__(self, batches: Any, *, all_data: bool = False) -> None:
        sampler = batches.batch_sampler if isinstance(batches, DataLoader) else None
        self.drops = all_data or bool(getattr(batches if sampler is None else sampler, "drop_last", False))
        """Whether no batch comes that is not full."""
        self.made = callable(batches) and not hasattr(batches, "__iter__")
        """Whether a function makes the batches, and no loader ends an epoch."""
        self.data = self.batch_size = 0
        self.shuffles = False
        """Whether another epoch ends with other rows."""
        self._last: tuple[Any, ...] = ()
        if type(sampler) is BatchSampler and hasattr(batches.dataset, "__getitem__"):
            with contextlib.suppress(TypeError, NotImplementedError):
                self.data = len(sampler.sampler)  # type: ignore[arg-type]
        if isinstance(sampler, BatchSampler) and 0 < self.data <= MOST_ROWS:
            self.batch_size, self.shuffles = sampler.batch_size, type(sampler.sampler) is not SequentialSampler
            self._last = tuple(sampler.sampler)[-(self.data % self.batch_size or self.batch_size) :]
        self.rows = len(self._last)
        self.leaves_one = not self.drops and self.rows == 1 < self.batch_size
        self.leaves_any = self.leaves_one and self.shuffles
        """Whether any row may be the one that is left."""
        self.leaves_none = self.drops or (self.rows > 0 and not self.leaves_one)
        """Whether it is known that no batch of one row comes."""

    def last_batch(self, batches: Any) -> Any:
        """What the loader makes of the last rows. Raises ``CannotDecide`` where its data set does not give them."""
        indices, several = list(self._last), getattr(batches.dataset, "__getitems__", None)
        try:
            return batches.collate_fn(several(indices) if several else [batches.dataset[index] for index in indices])
        except Exception as error:  # of the project's data set or collate function
            reraise_ours(error)
            raise CannotDecide(
                f"the loader's last batch cannot be composed: {type(error).__name__}: {error}"
            ) from error


class SqueezeCall(NamedTuple):
    """One call of ``squeeze``: the shape of its input, the axes that it removed, and how the user writes it."""

    shape: tuple[int, ...]
    removed: frozenset[int]
    call: str
    place: Place


class Squeezes(WatchingMode):
    """``calls`` are those of the last run. Those that ``instead`` holds remove the axes that they removed there.

    Without a dim ``squeeze`` removes every axis of size 1, the row axis among them once a batch has one row;
    ``squeeze(0)`` does so by name.
    """

    def __init__(self, instead: Mapping[Key, SqueezeCall] | None = None) -> None:
        super().__init__()
        self.instead = instead or {}
        self._passed: Counter[tuple[str, int]] = Counter()
        self.calls: dict[Key, SqueezeCall] = {}

    def contexts(self, watch: Watch) -> Iterable[AbstractContextManager[Any]]:
        self._passed, self.calls = Counter(), {}
        return super().contexts(watch)

    def active(self) -> bool:
        """Inside steps and backward passes too: each call is counted, and does what it did in the other run."""
        return not self.watch.is_suspended

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = sys._getframe(2)
        if name not in ("squeeze", "squeeze_") or not layer(frame.f_code.co_filename):
            return passed_on(func, args, kwargs)  # torch's own calls
        tensor = args[0] if args else kwargs["input"]
        shape, given = tuple(tensor.shape), args[1:] or (kwargs.get("dim", ()),)
        dims = tuple(given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given)
        named = {d % len(shape) for d in dims} if shape and all(isinstance(d, int) for d in dims) else set()
        removed = frozenset(d for d, size in enumerate(shape) if size == 1 and (not dims or d in named))
        at = frame.f_code.co_filename, frame.f_lasti
        key = (*at, self._passed[at])
        self._passed[at] += 1
        with self.watch.suspended():
            self.calls[key] = SqueezeCall(shape, removed, f"{name}({', '.join(map(str, dims))})", here()[0])
        other = self.instead.get(key)
        if other is None or len(other.shape) != len(shape):
            return passed_on(func, args, kwargs)
        return func(tensor, tuple(sorted(other.removed))) if other.removed else tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run over a batch went."""

    words: str
    """What the batch is."""
    composition: Composition | None = None
    """The same as data, where it is composed of rows of the example."""
    raised: str = ""
    """The exception that ended the run."""
    where: str = ""
    raised_by_loop: bool = False
    """Whether the project's own code raised it, by ``raise`` or ``assert``."""
    steps: bool = False
    """Whether an optimizer made a step."""
    nonfinite: tuple[str, ...] = ()
    """Weights that were finite before the run."""
    nonfinite_loss: bool = False
    """Whether backward was called on a loss that is not finite."""
    origin: NonFiniteOrigin | None = None
    """The first operation whose result is not finite."""

    @property
    def ok(self) -> bool:
        return not self.raised and not self.nonfinite

    @property
    def failure(self) -> str:
        if self.raised:
            return f"fit raises {self.raised}"
        return f"{some(self.nonfinite)} {be(self.nonfinite)} not finite after a step"


class Edges:
    """The example batch, what is known of other batches, and the runs over what is composed of it.

    Raises ``CannotDecide`` where no batch can be composed.
    """

    def __init__(self, evidence: Evidence) -> None:
        seen, loop = evidence.run(), evidence.fresh_loop()
        self._evidence, self._plan = evidence, evidence.plan()
        self.windows = evidence.plan(accumulate=2) if "accumulate" in evidence.knobs else None
        if seen.raised is not None or became_nonfinite(seen):
            raise CannotDecide("the loop does not run through on its own batches: see the checks before this one")
        if not seen.steps:
            raise CannotDecide("the loop makes no optimizer step on its own batches")
        if loop.split_batch is not None or not isinstance(loop.batch_dim, (int, type(None))):
            raise CannotDecide(
                "split_batch= splits the batch: give batch_dim= to have single rows taken from it", needs="batch_dim="
            )
        self.gradients = evidence.shared(StepGradients.of)
        self.batch, self.count, cut = self.gradients.batch, self.gradients.rows, self.gradients.cut
        if isinstance(self.batch, list) and not any(isinstance(item, torch.Tensor) for item in self.batch):
            raise CannotDecide("the batch is a list of items, and rows are taken along an axis of tensors only")
        self.padding, self.squeezes = loop.padding, Squeezes()
        with preserved():
            # a quasi-Newton method works on one and the same function at every step: that of the whole data set
            all_data = any(optimizer.kind == "LBFGS" for optimizer in seen.optimizers)
            self.ending = Ending(loop.batches, all_data=all_data)
            self.lengths, self.padded_to = lengths_of(self.batch, loop)
            others = first_batches(loop, COMPARED) if 1 in self.lengths and loop.batches is not None else []
            widths = {self.padded_to, *(lengths_of(batch, loop)[1] for batch in others)}
            self.widths_differ = len(widths - {0}) > 1
            self.empty_rows = rows_without(self.batch, nested.rows(self.batch, cut.axis), cut.axis, loop.padding, seen)
        order = cut.valid.order[::-1] if cut.valid.counts else cut.valid.order
        self.counting = [row for row in order if row not in self.empty_rows] or list(order)
        """The rows in which something counts, the fullest first; all of them where each lacks something."""
        self.first = Composition((self.counting[0],))
        self.whole = Composition(tuple(range(self.count)))

    @cached_property
    def one_row(self) -> Outcome:
        """The run over a row in which something counts, with ``squeezes`` on."""
        return self.outcome("1 row", self.first, self.squeezes.contexts)

    def among_full(self, words: str, made_of: Composition | Compose, plan: RunPlan | None = None) -> Outcome:
        """Full batches and this one in turn: what a loop sets up from its first batch, or sums over a window, is as in
        an epoch. Where values are not finite, the run is made again to find the first operation that made one."""
        outcome = self.outcome(words, made_of, full=True, plan=plan)
        if not outcome.nonfinite and not outcome.nonfinite_loss:
            return outcome
        origins = NonFiniteOrigins()
        self.outcome(words, made_of, origins.contexts, full=True, plan=plan)
        return replace(outcome, origin=origins.first, where=str(origins.first.place) if origins.first else "")

    def outcome(
        self,
        words: str,
        made_of: Composition | Compose,
        contexts: Contexts = lambda watch: (),
        *,
        full: bool = False,
        plan: RunPlan | None = None,
    ) -> Outcome:
        """The loop over this batch, again and again; with ``full``, over a full batch before each."""
        composition = made_of if isinstance(made_of, Composition) else None

        def stream(loop: TrainLoop) -> Any:
            made = self.gradients.composed(made_of) if isinstance(made_of, Composition) else [made_of(loop)]
            return itertools.cycle([*([self.batch] if full else []), *made])

        steps = 2 * STEPS_OF_A_RUN if full else STEPS_OF_A_RUN
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the shapes and deviations of single values
                record = self._evidence.rerun(
                    plan or self._plan,
                    stream=stream,
                    contexts=contexts,
                    enough=lambda record: record.rounds >= steps,
                    may_raise=True,
                )
        except (UserCodeError, UsageError) as error:
            return Outcome(words, composition, error.error.summary if isinstance(error, UserCodeError) else str(error))
        raised, stepped = record.raised, record.steps > 0
        if raised is not None:
            by_loop = raised.place.code.startswith(("raise", "assert "))
            return Outcome(words, composition, raised.summary, str(raised.place), by_loop, stepped)
        lost = tuple(parameter.name for parameter in became_nonfinite(record))
        infinite = any(not math.isfinite(root.value) for b in record.backwards() for root in b.roots)
        return Outcome(words, composition, steps=stepped, nonfinite=lost, nonfinite_loss=infinite)


def lengths_of(batch: Any, loop: TrainLoop) -> tuple[tuple[int, ...], int]:
    """The length of each row, where padding at the ends of rows is proven, and what rows are padded to; else nothing
    and 0."""
    if loop.batch_dim not in (None, 0):
        return (), 0
    read = read_paddings(
        batch,
        at_least=Proof.EMPTY,  # rows are cut there, and all tensors with them
        declared=loop.padding,
        pad_ids=padding_ids(loop.modules.values()),
    )
    return next(((found.lengths, found.grid.length) for found in read if found.side == "right"), ((), 0))
