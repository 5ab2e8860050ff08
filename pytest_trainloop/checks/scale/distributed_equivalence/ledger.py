"""What a rank's run is watched for besides its record: weights at each step, draws, files, and the wrapper's calls."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from pytest_trainloop import members
from pytest_trainloop.checks.scale.distributed_equivalence.samplers import Shared, noting
from pytest_trainloop.checks.scale.distributed_equivalence.shards import sampled
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.samples import as_real, places, readable, spaced
from pytest_trainloop.recording.shards import is_distributed, local
from pytest_trainloop.recording.source import here, layer
from pytest_trainloop.recording.torch_names import DRAWS, SAMPLES
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

Values = dict[str, tuple[float, ...]]
"""Sampled entries by name."""

DRAWN = 64
"""Draws at one line that are kept."""


@dataclass(slots=True)
class Wrapped:
    """The DistributedDataParallel instances of a run, and whether it asked which rank it is."""

    built: int = 0
    calls: int = 0
    late: tuple[str, ...] = ()
    """Parameters of the wrapped modules that were not there when they were wrapped."""
    asks: bool = False
    """Whether the project, or a library but torch, asked for its rank or for the number of ranks."""


class Wrappers:
    """Follows the DistributedDataParallel instances that are built and called, and who asks for its rank."""

    def __init__(self) -> None:
        self.wrapped = Wrapped()
        self._live: list[tuple[Any, list[torch.Tensor]]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with Patches() as patches:
            patches.put(DistributedDataParallel, "__init__", self._building)
            patches.put(DistributedDataParallel, "forward", self._calling)
            for name in ("get_rank", "get_world_size"):
                patches.put(torch.distributed, name, self._asking)
            try:
                yield
            finally:
                self.wrapped.late = tuple(self._late())
                self._live.clear()

    def _building(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            original(wrapper, *args, **kwargs)
            self.wrapped.built += 1
            self._live.append((wrapper, list(members.parameters(wrapper.module))))

        return init

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            self.wrapped.calls += 1
            return original(wrapper, *args, **kwargs)

        return forward

    def _asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def asked(*args: Any, **kwargs: Any) -> Any:
            self.wrapped.asks = self.wrapped.asks or layer(sys._getframe(2).f_code.co_filename) > 0
            return original(*args, **kwargs)

        return asked

    def _late(self) -> Iterator[str]:
        for wrapper, before in self._live:
            known = {id(parameter) for parameter in before}
            yield from (name for name, p in members.named_parameters(wrapper.module) if id(p) not in known)


@dataclass(slots=True)
class Seen:
    """What the ledger of one rank holds. Plain data."""

    digests: list[dict[str, bytes]] = field(default_factory=list)
    """Of the sampled entries of each weight and buffer before each step, and at the end; of buffers first as they were
    before ``fit``, since a forward pass may change them."""
    entered: Values = field(default_factory=dict)
    """Weights and buffers before ``fit``."""
    first: Values = field(default_factory=dict)
    """The same before the first step."""
    last: Values = field(default_factory=dict)
    """The same at the end."""
    buffers: frozenset[str] = frozenset()
    """Which of these names are buffers."""
    stepped: set[str] = field(default_factory=set)
    """The parameters that an optimizer holds."""
    shards: dict[str, tuple[tuple[int, ...], tuple[float, ...], int]] = field(default_factory=dict)
    """Of the gradient of each DTensor that the first step read: the numbers of the sampled entries that the rank holds,
    their values, and how many the whole sample has."""
    ends: dict[str, tuple[tuple[int, ...], tuple[float, ...], int]] = field(default_factory=dict)
    """The same of the DTensors themselves, at the end."""
    draws: dict[Place, list[bytes]] = field(default_factory=dict)
    """By line what was drawn there, as digests."""
    written: dict[str, Place] = field(default_factory=dict)
    """The files that torch.save and safetensors wrote, with the line of each."""
    samplers: list[Shared] = field(default_factory=list)
    """The DistributedSamplers that were iterated over."""
    wrapped: Wrapped = field(default_factory=Wrapped)
    strange: list[str] = field(default_factory=list)
    """Weights and buffers that one process does not have, or has in another shape."""


class Ledger(contextlib.AbstractContextManager[None]):
    """Fills a ``Seen`` while ``fit`` runs."""

    def __init__(self, watch: Watch, seen: Seen) -> None:
        self._watch, self.seen = watch, seen
        self._exit = contextlib.ExitStack()
        self._depth = 0

    def __enter__(self) -> None:
        patches = self._exit.enter_context(Patches())
        for module, name, position in (("torch", "save", 1), ("safetensors.torch", "save_file", 1)):
            if module in sys.modules:
                patches.put(sys.modules[module], name, functools.partial(self._saving, position))
        patches.put(DistributedSampler, "__iter__", noting(self.seen.samplers))
        self._exit.enter_context(hooked(before_steps(self._before), after_steps(self._after)))
        self._exit.enter_context(_Draws(self._watch, self.seen))
        with self._watch.suspended(), torch.no_grad():
            self.seen.entered = dict(self._state())

    def __exit__(self, *_error: object) -> None:
        try:
            with self._watch.suspended(), torch.no_grad():
                self.seen.last = dict(self._state())
                if self.seen.digests:
                    self.seen.digests.append(_digests(self.seen.last))
                for name, tensor in self._tensors():
                    if is_distributed(tensor):
                        self.seen.ends[name] = *sampled(tensor), _entries(tensor)
        finally:
            self._exit.close()

    def _before(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._watch.is_suspended:
            return
        self._depth += 1
        with self._watch.suspended(), torch.no_grad():
            if self._depth == 1:
                self._note(dict(self._state()))
            self._read(optimizer)

    def _note(self, state: Values) -> None:
        if not self.seen.digests:
            self.seen.first = state
            state = state | {name: v for name, v in self.seen.entered.items() if name in self.seen.buffers}
        self.seen.digests.append(_digests(state))

    def _after(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._watch.is_suspended:
            self._depth = max(0, self._depth - 1)

    def _read(self, optimizer: Any) -> None:
        """Note the shards of gradients that the first step of each parameter reads."""
        table = self._watch.table
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            index = table.index(parameter)
            if index is None:
                continue
            name = plain(table.entries[index].name)
            self.seen.stepped.add(name)
            if is_distributed(parameter.grad) and name not in self.seen.shards:
                self.seen.shards[name] = *sampled(parameter.grad), _entries(parameter.grad)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry, tensor in zip(self._watch.table.entries, self._watch.table.tensors, strict=True):
            yield plain(entry.name), tensor

    def _state(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Sampled entries of what every rank is to hold in the same way: no shard."""
        buffers = set()
        for name, tensor in self._tensors():
            if readable(tensor) and not is_distributed(tensor):
                yield name, _values(tensor)
        for path, module in self._watch.table.named_modules():
            for own, buffer in members.named_buffers(module, recurse=False):
                name = plain(f"{path}.{own}" if path else own)
                if readable(buffer) and not is_distributed(buffer):
                    buffers.add(name)
                    yield name, _values(buffer)
        self.seen.buffers = frozenset(buffers)

    def _saving(self, position: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            given = args[position] if len(args) > position else kwargs.get("f", kwargs.get("filename"))
            if isinstance(given, (str, os.PathLike)):
                self.seen.written.setdefault(os.path.realpath(given), here()[0])
            return original(*args, **kwargs)

        return save


class _Draws(FunctionMode):
    """Notes what is drawn, by line."""

    def __init__(self, watch: Watch, seen: Seen) -> None:
        super().__init__()
        self._watch, self._seen = watch, seen

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(name, func, args, kwargs)
        if name not in _DRAWING or self._watch.is_suspended:
            return out
        if not isinstance(out, torch.Tensor) or not readable(local(out)) or not out.numel():
            return out
        if kwargs.get("generator") is None or _is_noise(out):
            kept = self._seen.draws.setdefault(here()[0], [])
            if len(kept) < DRAWN:
                with self._watch.suspended(), torch.no_grad():
                    kept.append(_digest(spaced(local(out))))
        return out


_DRAWING = DRAWS | SAMPLES


def _is_noise(drawn: torch.Tensor) -> bool:
    """Of a generator of the project's own: a choice that all ranks have in common is one number, or whole ones."""
    return drawn.is_floating_point() and drawn.numel() > 1


def _values(tensor: torch.Tensor) -> tuple[float, ...]:
    entries = as_real(spaced(tensor.detach())).flatten()
    return tuple(entries.to(torch.float64).tolist())


def _entries(tensor: torch.Tensor) -> int:
    return len(places(tensor.numel()))


def _digest(entries: torch.Tensor) -> bytes:
    return hashlib.blake2b(repr(entries.tolist()).encode(), digest_size=8).digest()


def _digests(values: Values) -> dict[str, bytes]:
    return {name: hashlib.blake2b(repr(entries).encode(), digest_size=8).digest() for name, entries in values.items()}
