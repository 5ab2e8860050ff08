"""Every collective of a process, told as it is called.

Torch calls its process groups through operators, ``torch.ops.c10d``: ``torch.distributed``'s functions, the reducer of
DistributedDataParallel in C++, FSDP, DTensor and functional collectives alike. Their kernels are replaced by ones that
tell of the call and then make it. No mode and no hook is needed, so that compiled code and inference mode are seen too.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.ranks.facts import Collective
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import argument_names, in_backward

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
        self.quiet = False
        """Whether what is called now is none of the user's."""

    def begin(self, devices: Sequence[str] = ("CPU",)) -> None:
        """Replace the kernels until the process ends. Raises ``CannotDecide`` where this torch cannot give them."""
        if not hasattr(torch.library, "get_kernel"):
            raise CannotDecide(f"torch {torch.__version__} cannot tell which collectives are called: give 2.9 or newer")
        library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries.append(library)  # its end would put the kernels back
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a kernel is replaced: that is meant
            for name in KINDS:
                op = getattr(torch.ops.c10d, name).default
                for device in devices:
                    kernel = torch.library.get_kernel(op, device)
                    call = functools.partial(self._called, name, argument_names(op), kernel)
                    library.impl(  # type: ignore[no-untyped-call]
                        name, call, device, with_keyset=True, allow_override=True
                    )
        after_steps(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        self._tell("step", self.steps)

    def _called(self, name: str, names: Sequence[str], kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.quiet:
            self._note(name, {**dict(zip(names, args, strict=False)), **kwargs})
        return kernel.call_boxed(keys, *args, **kwargs)

    def _note(self, name: str, given: dict[str, Any]) -> None:
        kind, payload = KINDS[name]
        group = dist.ProcessGroup.unbox(given["process_group"])
        tensors = _tensors(given.get(payload))
        members = tuple(dist.get_process_group_ranks(group))
        self.note(
            kind,
            group.group_name,
            *_channel(name, given, group.group_name, group.rank(), members),
            shapes=tuple(tuple(t.shape) for t in tensors),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            root=given.get("root_rank"),
            operation=_operation(given.get("reduce_op")),
            waits=given.get("async_op") is False or name == "monitored_barrier_",
        )

    def waits_outside(self, kind: str, members: tuple[int, ...]) -> None:
        """Tell that this process waits for the others without a collective."""
        self.note(kind, "", "", members, waits=True)

    def note(self, kind: str, group: str, channel: str, members: tuple[int, ...], **more: Any) -> None:
        """Tell of one call of a group."""
        number = self._numbers.get(channel, 0)
        self._numbers[channel] = number + 1
        call = Collective(kind, group, number, place=here()[0], steps=self.steps, in_backward=in_backward(), **more)
        self._tell("collective", (channel, members, call))


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
