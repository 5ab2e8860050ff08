"""The process groups of a launched process: a default one from the start, and the project's own answered like it.

Whatever a project asks for, the processes meet in a file: no port is opened by this package, and none that a project
names is taken twice by two sessions on one machine.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pytest_trainloop.recording.torch_internals import wrapped_cell

if TYPE_CHECKING:
    from collections.abc import Callable


class Groups:
    """``torch.distributed.init_process_group`` of one process of ``ranks``, which meet in ``folder``."""

    def __init__(self, rank: int, ranks: int, folder: str, seconds: float, waits: Callable[..., None]) -> None:
        self._rank, self._ranks, self._folder = rank, ranks, Path(folder)
        self._timeout = timedelta(seconds=seconds)
        self._made = 0
        self._ours = False
        self._init: Callable[..., Any] = dist.init_process_group
        self._waits = waits
        """Called with what this process does and the ranks that it waits for, where that is no collective."""

    def begin(self) -> None:
        """Make the default group, and answer the project's calls from now on, also of those who have imported the
        function by its name."""
        cell = wrapped_cell(dist.init_process_group)
        self._init = cell.cell_contents
        cell.cell_contents = self._asked
        self._make("gloo", self._rank, self._ranks)
        dist.barrier()  # a process that is connected may end the group while another still connects
        self._ours = True

    def end(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _asked(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        **_more: Any,
    ) -> None:
        if dist.is_initialized() and self._ours:
            dist.destroy_process_group()
        self._ours = False
        own = self._rank if rank < 0 else rank
        self._make(_answered(backend), own, self._ranks if world_size < 0 else world_size)

    def _make(self, backend: str, rank: int, ranks: int) -> None:
        if dist.is_initialized():
            self._init(backend=backend, rank=rank, world_size=ranks)  # as torch says that
        self._made += 1
        alone = ranks != self._ranks  # as a project says that makes each process a group of its own
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(self._folder / f"group{self._made}{f'-{self._rank}' if alone else ''}"), ranks
        )
        if not alone and self._made > 1:
            self._waits("init_process_group", tuple(range(ranks)))
        self._init(backend=backend, store=store, rank=rank, world_size=ranks, timeout=self._timeout)


def _answered(backend: str | None) -> str:
    """The backend that can be had: gloo in place of nccl on a machine without CUDA."""
    if backend is None or "nccl" in backend or ":" in str(backend):
        return "gloo"
    return str(backend).lower()
