"""Which weights the calls of torch are given, when each was read last, and which are made anew at one line."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import storage_of
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import ATTRIBUTES, AUTOGRAD_CALLS, CONSTANT_ATTRIBUTES, SIZES
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

STEPS = 4
"""Optimizer steps that are looked at."""

NO_READS = SIZES | AUTOGRAD_CALLS | CONSTANT_ATTRIBUTES | frozenset("requires_grad_ is_floating_point __set__".split())


@dataclass(frozen=True, slots=True)
class MadeAnew:
    """Parameters that were first used at one line, each in another pass, inside a module of the model."""

    place: Place
    module: str
    """The module of the model whose call made them."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """Two parameters that are held by optimizers and lie at one place in memory."""

    first: int
    second: int


@dataclass(eq=False)
class Reads(WatchingMode):
    """Notes reads of parameters in a run that is made in its ``contexts``."""

    last: dict[int, int] = field(default_factory=dict)
    """By the index of a parameter, the position in the record at which it was last given to a call."""
    shared: list[SharedStorage] = field(default_factory=list)
    anew: dict[tuple[str, int], list[tuple[int, MadeAnew]]] = field(default_factory=dict)
    """By line, the steps made so far and what was made there."""
    record: Record | None = None
    _storages: dict[int, list[int]] = field(default_factory=dict)
    _known: int = -1
    _new: set[int] = field(default_factory=set)
    _kept: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        WatchingMode.__init__(self)

    @classmethod
    def of(cls, evidence: Evidence) -> Reads:
        """What the first steps of the loop read."""
        reads = cls()
        reads.record = evidence.rerun(
            contexts=reads.contexts, enough=lambda record: record.rounds >= STEPS, may_raise=True
        )
        return reads

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch):
            try:
                yield
            finally:
                with watch.suspended():
                    self._refresh(watch)
                    self.shared = list(_one_place(watch))
                self._kept.clear()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = name_of(func)
        if known not in NO_READS and name != "__set__":
            watch = self.watch
            with watch.suspended():
                self._refresh(watch)
                for tensor in tensors_in(args, kwargs):
                    self._note(watch, tensor, attribute=name in ATTRIBUTES)
        return super().call(name, func, args, kwargs)

    def _refresh(self, watch: Watch) -> None:
        """Take up the parameters that were entered since."""
        if len(watch.table.tensors) == self._known:
            return
        self._known = len(watch.table.tensors)
        self._storages.clear()
        for index, tensor in enumerate(watch.table.tensors):
            at = storage_of(tensor)
            if at:
                self._storages.setdefault(at, []).append(index)

    def _note(self, watch: Watch, tensor: torch.Tensor, *, attribute: bool) -> None:
        at = storage_of(tensor)
        for index in self._storages.get(at, ()):
            self.last[index] = watch.tick()
        fresh = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad and not attribute
        if fresh and watch.record.rounds and id(tensor) not in self._new and torch.is_grad_enabled():
            self._note_new(watch, tensor)

    def _note_new(self, watch: Watch, tensor: torch.Tensor) -> None:
        """A parameter that is used for the first time after the first step, inside a module that the project gave."""
        index = watch.table.index(tensor)
        if index is not None and (watch.table.entries[index].declared or watch.table.entries[index].role == "foreign"):
            return
        inside = [
            m
            for m in watch.thread.modules
            if watch.table.knows(m) and all(p is not tensor for p in members.parameters(m))
        ]
        declared = [m for m in inside if any(True for _ in members.parameters(m))]
        if not declared:
            return
        self._new.add(id(tensor))
        self._kept.append(tensor)  # its identity may not come again
        place, _ = here()
        made = MadeAnew(place, watch.table.path_of(declared[-1]), tuple(tensor.shape))
        self.anew.setdefault((place.file, place.line), []).append((watch.record.rounds, made))

    @property
    def made_anew(self) -> list[MadeAnew]:
        """What is made anew in each of at least two further steps."""
        return [made[0][1] for made in self.anew.values() if len({step for step, _ in made}) >= min(2, STEPS - 1)]


def _one_place(watch: Watch) -> Iterator[SharedStorage]:
    """Pairs of held parameters whose entries lie at the same places in memory."""
    held = watch.record.held
    tensors = watch.table.tensors
    places: dict[object, int] = {}
    for index in sorted(held):
        tensor = tensors[index]
        if storage_of(tensor) and tensor.is_leaf:
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if key in places:
                yield SharedStorage(places[key], index)
            places.setdefault(key, index)
