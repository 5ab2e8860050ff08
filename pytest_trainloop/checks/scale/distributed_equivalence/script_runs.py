"""What one rank of a watched script does: as of a rank of a test, and what its wrappers hold and are given."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import RankResult, first, noted, wrappers_noted
from pytest_trainloop.core import members
from pytest_trainloop.declare.nested.walk import paths
from pytest_trainloop.instruments.tracing.batches_taken import batches_taken
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.samples import readable, spaced
from pytest_trainloop.recording.shards import local
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.ranks.facts import Launch

STEPS = 40
"""Steps before which the weights of a script are looked at: more than are watched unless ``--steps`` says so."""


@dataclass(slots=True)
class ScriptRank(RankResult):
    """What one rank of a script did."""

    machine: str = field(default_factory=platform.node)
    stopped: bool = False
    """Whether the command stopped the script."""
    wrapped: set[str] = field(default_factory=set)
    """The parameters and buffers that a DistributedDataParallel over all ranks brings together."""
    own_buffers: set[str] = field(default_factory=set)
    """The buffers in such a wrapper that it does not send to the others."""
    building: bool = False
    """Whether a wrapper was being built when the rank came to its end."""
    loose: bool = False
    """Whether some step reads gradients of ``no_sync`` alone, or of a hook of the project's: weights may be averaged
    later."""
    given: list[bytes] = field(default_factory=list)
    """Of each of the first steps a digest of what the wrappers were called with; without a wrapper, of the batches."""
    loaded: bool = True
    """Whether each of these came from a DataLoader."""


def watched_launch(_evidence: object) -> Launch | None:
    """What the ranks of a watched script did: the command puts it in the place of this answer."""
    return None


@contextlib.contextmanager
def script_noted(watch: Watch, result: ScriptRank, ranks: int) -> Iterator[None]:
    """Fill the result while the script runs."""
    wrappers: list[Any] = []
    calls: list[bytes] = []
    batches: list[bytes] = []
    synchronised = called = False

    def building(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            result.building = True
            original(wrapper, *args, **kwargs)
            result.building = False
            wrappers.append(wrapper)

        return init

    def calling(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal synchronised, called
        if torch.is_grad_enabled() and watch.full and not watch.is_suspended:
            with watch.suspended(), torch.no_grad():
                calls.append(_digest((args, kwargs)))
            called, synchronised = True, synchronised or wrapper.require_backward_grad_sync

    def hooking(*_args: Any, **_kwargs: Any) -> None:
        result.loose = True

    def before(*_args: Any) -> None:
        nonlocal synchronised, called
        if watch.full and not watch.is_suspended and (calls or batches):
            result.loaded = result.loaded and bool(batches)
            result.given.append(b"".join(calls or batches))
            result.loose = result.loose or (called and not synchronised)
            calls.clear()
            batches.clear()
            synchronised = called = False

    with contextlib.ExitStack() as stack:
        stack.enter_context(wrappers_noted(result))
        stack.enter_context(noted(watch, result, contextlib.nullcontext(), STEPS))
        stack.enter_context(patched(DistributedDataParallel, "__init__", building))
        stack.enter_context(patched(DistributedDataParallel, "register_comm_hook", first(hooking)))
        stack.enter_context(patched(DistributedDataParallel, "forward", first(calling)))
        stack.enter_context(hooked(before_steps(before)))
        stack.enter_context(batches_taken(lambda _number, batch: batches.append(_digest(batch)), watch))
        try:
            yield
        finally:
            for wrapper in wrappers:
                if wrapper.process_group.size() == ranks:
                    _note_wrapper(watch, wrapper, result)


def _note_wrapper(watch: Watch, wrapper: Any, result: ScriptRank) -> None:
    """The names that the watch has for what a wrapper holds."""
    ignored = {plain(name) for name in getattr(wrapper, "parameters_to_ignore", ())}
    for name, parameter in members.named_parameters(wrapper.module):
        index = watch.table.index(parameter)
        if index is not None and plain(name) not in ignored:
            result.wrapped.add(plain(watch.table.entries[index].name))
    inside = {id(module) for module in members.modules(wrapper.module)}
    for path, module in watch.table.named_modules():
        if id(module) in inside:
            for own, _ in members.named_buffers(module, recurse=False):
                name = plain(f"{path}.{own}" if path else own)
                (result.wrapped if wrapper.broadcast_buffers else result.own_buffers).add(name)


def _digest(nest: Any) -> bytes:
    """Of the tensors in a nest, by sampled entries."""
    digest = hashlib.blake2b(digest_size=8)
    for path, tensor in paths(nest):
        if readable(local(tensor)) and tensor.numel():
            digest.update(repr((path, tuple(tensor.shape), spaced(local(tensor.detach())).tolist())).encode())
    return digest.digest()
