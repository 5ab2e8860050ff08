"""One further run for the card: sizes of gradients and updates, options of groups, batches, and the lines that made
each part."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.whose import project_may_raise, reraise_ours
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.instruments.tracing.made_at import Contexts
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

HASHED = 1 << 20
"""Bytes of a batch that its identity is read from."""


@dataclass(slots=True)
class Group:
    """One group of an optimizer, at its first and its last measured step."""

    name: str = ""
    names: list[str] = field(default_factory=list)
    decay: float = 0.0
    norms: list[float] = field(default_factory=list)
    """|g| of all its tensors together, as a step reads it: NaN where it has none."""
    moved: list[float] = field(default_factory=list)
    """|update| / |weights|."""


@dataclass(slots=True)
class Item:
    """One batch."""

    identity: str
    rows: int
    leaves: list[tuple[str, tuple[int, ...], str]]
    """Path, shape and dtype of each tensor."""
    counts: dict[int, dict[str, int]]
    """By a label that occurs: by path, how many of its entries are that label. Only negative labels, which losses
    ignore."""


@dataclass(slots=True)
class Measured:
    """What the run shows, as plain data."""

    record: Record | None = None
    made: MadeAt = field(default_factory=MadeAt)
    groups: dict[int, list[Group]] = field(default_factory=dict)
    """By optimizer."""
    state_dtypes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    tied: list[tuple[str, ...]] = field(default_factory=list)
    """Names of one and the same parameter."""
    buffers: int = 0
    devices: tuple[str, ...] = ()
    loader: str = ""
    """The DataLoader that gives the batches, in words."""
    length: int = 0
    """The batches of one pass over ``batches=``; 0 where they are not sized."""
    given: frozenset[str] = frozenset()
    fields: dict[str, str] = field(default_factory=dict)
    """The line that gives each field of the ``TrainLoop`` that was given, as text."""
    why: str = ""
    """Why nothing was measured."""

    @classmethod
    def of(cls, evidence: Evidence) -> Measured:
        return cls.along(evidence)

    @classmethod
    def along(
        cls,
        evidence: Evidence,
        look: Contexts = lambda watch: (),
        note: Callable[[int, Any], None] = lambda number, item: None,
    ) -> Measured:
        """What the run shows in which ``look`` is entered too, and ``note`` is called with each batch."""
        found = cls(given=evidence.offers)

        def before_item(number: int, item: Any) -> None:
            found._note(item)
            note(number, item)

        if not evidence.repeatable:
            found.why = "watched once"
            return found
        last = max((o.steps for o in evidence.run().optimizers), default=1)
        try:
            found.record = found.made.along(
                evidence, lambda watch: (*look(watch), _Looking(found, watch, last).on()), before_item=before_item
            )
            found._read_declared(evidence)
        except (CannotDecide, UsageError, UserCodeError) as reason:
            found.why = str(reason)
        return found

    def _note(self, item: Any) -> None:
        digest = hashlib.sha256()
        leaves = []
        counts: dict[int, dict[str, int]] = {}
        for path, tensor in nested.paths(item):
            name = nested.shown(path)
            leaves.append((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
            if tensor.is_sparse or tensor.is_nested or tensor.is_meta:
                continue
            flat = tensor.detach().flatten()[: HASHED // tensor.element_size()].cpu().contiguous()
            digest.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
            if tensor.dtype in (torch.int64, torch.int32) and tensor.numel():
                values, often = torch.unique(flat[flat < 0], return_counts=True)
                for value, count in zip(values.tolist()[:4], often.tolist()[:4], strict=True):
                    counts.setdefault(value, {})[name] = count
        try:
            rows = nested.rows(item)
        except Exception as error:  # of data of a class of the project's
            reraise_ours(error)
            rows = 0
        self.items.append(Item(digest.hexdigest(), rows, leaves, counts))

    def _read_declared(self, evidence: Evidence) -> None:
        loop = evidence.fresh_loop()
        for name in self.given & {"batch", "batches"}:
            self.fields[name] = loop.located(UsageError(f"TrainLoop.{name} is given")).place
        given = loop.batches
        with contextlib.suppress(TypeError), project_may_raise():  # it may have no length
            self.length = len(given)
        if isinstance(given, torch.utils.data.DataLoader):
            sampler = type(given.sampler if given.batch_sampler is not None else given.batch_sampler).__name__
            size = "" if given.batch_size is None else f"batch_size {given.batch_size}, "
            dropped = ", drop_last" if given.drop_last else ""
            self.loader = f"DataLoader: {size}{sampler}{dropped}, {given.num_workers} workers"


class _Looking:
    """Hooks of one run."""

    def __init__(self, found: Measured, watch: Watch, last: int) -> None:
        self._found = found
        self._watch = watch
        self._wanted = {1, last}
        self._steps: dict[int, int] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with around_steps(self._watch, self._take, self._use):
            yield
        with self._watch.suspended():
            self._close()

    def _take(self, optimizer: Any) -> tuple[int, list[list[torch.Tensor]]] | None:
        index = self._watch.optimizers.index(optimizer)
        self._steps[index] = self._steps.get(index, 0) + 1
        if self._steps[index] not in self._wanted:
            return None
        groups = self._found.groups.setdefault(index, [])
        weights = []
        for number, options in enumerate(optimizer.param_groups):
            if number == len(groups):
                groups.append(Group())
            own = [p for p in options["params"] if isinstance(p, torch.Tensor) and not nn.parameter.is_lazy(p)]
            self._describe(groups[number], options, own)
            groups[number].norms.append(_norm(p.grad for p in own))
            weights.append([p.detach().clone() for p in own])
        return index, weights

    def _use(self, optimizer: Any, taken: tuple[int, list[list[torch.Tensor]]]) -> None:
        index, before = taken
        for group, options, old in zip(self._found.groups[index], optimizer.param_groups, before, strict=False):
            now = [p for p in options["params"] if isinstance(p, torch.Tensor) and not nn.parameter.is_lazy(p)]
            size = _norm(old)
            moved = _norm(n.detach() - o for n, o in zip(now, old, strict=False) if n.shape == o.shape)
            group.moved.append(moved / size if size > 0 else math.nan)

    def _describe(self, group: Group, options: dict[str, Any], own: list[torch.Tensor]) -> None:
        name = options.get("name", options.get("group_name", ""))
        group.name = name if isinstance(name, str) else ""
        decay = options.get("weight_decay", 0.0)
        group.decay = float(decay) if isinstance(decay, (int, float)) else 0.0
        indices = [i for p in own if (i := self._watch.table.index(p)) is not None]
        group.names = [self._watch.table.entries[i].name for i in indices]

    def _close(self) -> None:
        watch, found = self._watch, self._found
        for index, optimizer in watch.optimizers.indexed():
            states = [v for s in getattr(optimizer, "state", {}).values() if isinstance(s, dict) for v in s.values()]
            dtypes = {str(v.dtype).removeprefix("torch.") for v in states if isinstance(v, torch.Tensor) and v.dim()}
            found.state_dtypes[index] = tuple(sorted(dtypes))
        names: dict[int, list[str]] = {}
        storages: set[int] = set()
        devices: set[str] = set()
        for path, module in watch.table.named_modules():
            for name, parameter in members.named_parameters(module, recurse=False, remove_duplicate=False):
                names.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
                devices.add(parameter.device.type)
            storages.update(id(buffer) for _, buffer in members.named_buffers(module, recurse=False))
        found.tied = [tuple(own) for own in names.values() if len(own) > 1]
        found.buffers = len(storages)
        found.devices = tuple(sorted(devices))


def _norm(tensors: Iterable[torch.Tensor | None]) -> float:
    """The norm of all tensors joined; NaN where there is none."""
    squares = []
    for tensor in tensors:
        if tensor is None:
            continue
        dense = tensor.coalesce().values() if tensor.is_sparse else tensor
        squares.append(float(torch.linalg.vector_norm(dense.detach().double())) ** 2)
    return math.sqrt(sum(squares)) if squares else math.nan
