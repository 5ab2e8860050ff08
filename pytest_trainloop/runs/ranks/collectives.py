"""The process groups of a launched process, and every collective of it, reported as it is called.

Torch calls its process groups through operators, ``torch.ops.c10d``: ``torch.distributed``'s functions, the reducer of
DistributedDataParallel in C++, FSDP, DTensor and functional collectives. They are given a kernel that torch asks
before those of any device: it tells of the call and passes it on. No mode and no hook is needed, so that compiled code
and inference mode are seen too. It is passed on with Python's lock released, as torch makes the call: a thread of gloo
that lets go of a tensor waits for that lock, and holds one that a call takes.
"""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.mistakes import PASSING_OVER
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import (
    FIRST_KERNEL,
    argument_names,
    forget_process_groups,
    in_backward,
    is_waited_for,
    pass_on,
    wrapped_cell,
)
from pytest_trainloop.runs.ranks.facts import Collective

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "allgather_": ("all_gather", "input_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor"),
    "allgather_coalesced_": ("all_gather", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "barrier": ("barrier", ""),
    "monitored_barrier_": ("monitored_barrier", ""),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
}
"""Operators of ``torch.ops.c10d``: the public name of what they do, and the argument whose size is reported."""

SAME_SIZES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"),
    *("_allgather_base_", "_reduce_scatter_base_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter_tensor_coalesced_",
)
"""Those to which every rank gives as much as every other. Lists of tensors may be uneven: nccl takes them, and gloo
says that it does not."""


class Log:
    """Tells of each collective of this process before it is made, ``tell("collective", (channel, members, call))``, and
    of each optimizer step after it, ``tell("step", number)``.

    A channel is a group, or a sender and a receiver in it.
    """

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        self._tell = tell
        self._numbers: dict[str, int] = {}
        self._libraries: list[torch.library.Library] = []
        self.steps = 0
        self.era = ""
        """Which of several default groups, made one after the other, there is now: names start again in each."""
        self.alone: int | None = None
        """The rank of this process where the project made it a world of its own."""

    def begin(self) -> None:
        """Put the kernels in until the process ends."""
        library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries.append(library)  # its end would take the kernels out
        for name in KINDS:
            op = getattr(torch.ops.c10d, name).default
            call = functools.partial(self._called, name, argument_names(op), op)
            library.impl(name, call, FIRST_KERNEL, with_keyset=True)  # type: ignore[no-untyped-call]
        after_steps(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        self._tell("step", self.steps)

    def _called(self, name: str, names: Sequence[str], op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        with PASSING_OVER:
            self._note_operator(name, {**dict(zip(names, args, strict=False)), **kwargs})
        return pass_on(op, keys, args, kwargs)

    def _note_operator(self, name: str, given: dict[str, Any]) -> None:
        kind, payload = KINDS[name]
        group = dist.ProcessGroup.unbox(given["process_group"])
        tensors = _tensors(given.get(payload))
        members = tuple(dist.get_process_group_ranks(group))
        self._note(
            kind,
            group.group_name,
            *_channel(name, given, group.group_name, group.rank(), members),
            shapes=tuple(tuple(t.shape) for t in tensors),
            takes=tuple(t.numel() for t in _tensors(given["output_tensors"])) if name == "allgather_" else (),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            root=given.get("root_rank"),
            even=name in SAME_SIZES,
            waits=is_waited_for(given) or name == "monitored_barrier_",
        )

    def waits(self, kind: str, members: tuple[int, ...]) -> None:
        """Tell that this process waits for the others without a collective."""
        self._note(kind, "", kind + str(members), members, waits=True)

    def _note(self, kind: str, group: str, channel: str, members: tuple[int, ...], **more: Any) -> None:
        channel = self.era + channel
        number = self._numbers.get(channel, 0)
        self._numbers[channel] = number + 1
        call = Collective(kind, group, number, place=here()[0], steps=self.steps, in_backward=in_backward(), **more)
        self._tell("collective", (channel, members if self.alone is None else (self.alone,), call))


def _channel(
    name: str, given: dict[str, Any], group: str, own: int, members: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """The group, or the sender and the receiver in it; who takes from anybody waits for nobody that is known."""
    if name == "recv_any_source_":
        return f"{group} ?>{own}", ()
    if name not in ("send", "recv_"):
        return group, members
    a, b = (own, given["dst"]) if name == "send" else (given["src"], own)
    return f"{group} {a}>{b} {given['tag']}", (members[a], members[b])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, (list, tuple)) else []


class Groups:
    """``torch.distributed``'s process groups in one process of ``ranks``: a default one from the start, and the
    project's own answered like it.

    Whatever a project asks for, the processes meet in a file in ``folder``: no port is opened for it, and none that a
    project names is taken twice by two sessions on one machine.
    """

    def __init__(self, rank: int, ranks: int, folder: str, seconds: float, log: Log) -> None:
        self._rank, self._ranks, self._folder = rank, ranks, Path(folder)
        self._timeout = timedelta(seconds=seconds)
        self._log = log
        self._made = 0
        self._ours = False

    def begin(self) -> None:
        """Make the default group, and answer the project's calls from now on, also of those who have imported the
        functions by their names."""
        forget_process_groups()  # one of the parent's, that a run in a single process has made
        cells = wrapped_cell(dist.init_process_group), wrapped_cell(dist.new_group)
        self._init, self._new = (cell.cell_contents for cell in cells)
        for cell, ours in zip(cells, (self._asked_for_default, self._asked_for_more), strict=True):
            cell.cell_contents = ours
        self._make("gloo", self._rank, self._ranks)
        dist.barrier()  # a process that is connected may end the group while another still connects
        self._ours = True

    def _asked_for_default(self, *args: Any, **kwargs: Any) -> None:
        """``init_process_group``: the first call is answered with a group in place of the one that is there already."""
        asked = _arguments(self._init, args, kwargs)
        if dist.is_initialized() and self._ours:
            dist.destroy_process_group()
        self._ours = False
        rank, ranks = (asked[name] for name in ("rank", "world_size"))
        own = self._rank if rank is None or rank < 0 else int(rank)
        self._make(_answered(asked["backend"], self._ranks), own, self._ranks if (ranks or -1) < 0 else int(ranks))

    def _make(self, backend: str | None, rank: int, ranks: int) -> None:
        if dist.is_initialized():
            self._init(backend=backend, rank=rank, world_size=ranks)  # which torch refuses in its own words
        self._made += 1
        alone = ranks != self._ranks  # as a project says that makes each process a group of its own
        name = f"group{self._made}" + (f"-{self._rank}" if alone else "")
        if self._made > 1:
            self._log.era = f"{name} "
            self._log.alone = self._rank if alone else None
            if not alone:
                self._log.waits("init_process_group", tuple(range(ranks)))
        store = dist.FileStore(str(self._folder / name), ranks)  # type: ignore[attr-defined]
        self._init(backend=backend, store=store, rank=rank, world_size=ranks, timeout=self._timeout)

    def _asked_for_more(self, *args: Any, **kwargs: Any) -> Any:
        """``new_group``, whose members wait for each other."""
        asked = _arguments(self._new, args, kwargs)
        members = tuple(range(dist.get_world_size())) if asked["ranks"] is None else tuple(map(int, asked["ranks"]))
        if dist.get_rank() in members and len(members) > 1:
            self._log.waits("new_group", members)
        if isinstance(asked["backend"], str):
            asked["backend"] = _answered(asked["backend"], self._ranks)
        return self._new(**asked | {"timeout": self._timeout})


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _answered(backend: str | None, ranks: int) -> str | None:
    """The backend that can be had: gloo in place of nccl where each rank has no device of its own."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        return backend
    return str(backend).lower() if str(backend).lower() in ("gloo", "fake") else "gloo"
