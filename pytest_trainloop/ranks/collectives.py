"""Every collective of a process, told as it is called.

Torch calls its process groups through operators, ``torch.ops.c10d``: ``torch.distributed``'s functions, the reducer of
DistributedDataParallel in C++, FSDP, DTensor and functional collectives alike. They are given a kernel that torch asks
before those of any device: it tells of the call and passes it on. No mode and no hook is needed, so that compiled code
and inference mode are seen too. It is passed on with Python's lock released, as torch makes the call: a thread of gloo
that lets go of a tensor waits for that lock, and holds one that a call takes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_trainloop.ranks.facts import Collective
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.mistakes import PASSING_OVER
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import FIRST_KERNEL, argument_names, in_backward, pass_on

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
"""Operators of ``torch.ops.c10d``: the public name of what they do, and the argument whose size is told."""

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
        """Which of several default groups, made one after the other, there is now: names begin anew in each."""
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
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            root=given.get("root_rank"),
            operation=_operation(given.get("reduce_op")),
            even=name in SAME_SIZES,
            waits=given.get("async_op") is False or name == "monitored_barrier_",
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


def _operation(value: Any) -> str:
    return "" if value is None else str(dist.ReduceOp.RedOpType(value.op()).name)
