"""The process groups of a launched process: a default one from the start, and the project's own answered like it.

Whatever a project asks for, the processes meet in a file: no port is opened for it, and none that a project names is
taken twice by two sessions on one machine.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_trainloop.recording.torch_internals import forget_process_groups, wrapped_cell

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.ranks.collectives import Log


class Groups:
    """``torch.distributed``'s process groups in one process of ``ranks``, which meet in ``folder``."""

    def __init__(self, rank: int, ranks: int, folder: str, seconds: float, log: Log) -> None:
        self._rank, self._ranks, self._folder = rank, ranks, Path(folder)
        self._timeout = timedelta(seconds=seconds)
        self._log = log
        self._made = 0
        self._ours = False
        self._init: Callable[..., Any] = dist.init_process_group
        self._new: Callable[..., Any] = dist.new_group

    def begin(self) -> None:
        """Make the default group, and answer the project's calls from now on, also of those who have imported the
        functions by their names."""
        forget_process_groups()  # one of the parent's, that a run in a single process has made
        for function, ours, name in (
            (dist.init_process_group, self._asked_for_default, "_init"),
            (dist.new_group, self._asked_for_more, "_new"),
        ):
            cell = wrapped_cell(function)
            setattr(self, name, cell.cell_contents)
            cell.cell_contents = ours
        self._make("gloo", self._rank, self._ranks)
        dist.barrier()  # a process that is connected may end the group while another still connects
        self._ours = True

    def _asked_for_default(self, *args: Any, **kwargs: Any) -> None:
        """``init_process_group``: the first call is answered with a group in place of the one that is there already."""
        given = inspect.signature(self._init).bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        if dist.is_initialized() and self._ours:
            dist.destroy_process_group()
        self._ours = False
        rank, ranks = (asked[name] for name in ("rank", "world_size"))
        own = self._rank if rank is None or rank < 0 else int(rank)
        self._make(answered(asked["backend"], self._ranks), own, self._ranks if (ranks or -1) < 0 else int(ranks))

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
        given = inspect.signature(self._new).bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        members = tuple(range(dist.get_world_size())) if asked["ranks"] is None else tuple(map(int, asked["ranks"]))
        if dist.get_rank() in members and len(members) > 1:
            self._log.waits("new_group", members)
        backend = asked["backend"]
        changed: dict[str, Any] = {"timeout": self._timeout}
        if isinstance(backend, str):
            changed["backend"] = answered(backend, self._ranks)
        return self._new(**asked | changed)


def answered(backend: str | None, ranks: int) -> str | None:
    """The backend that can be had: gloo in place of nccl where each rank has no device of its own."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        return backend
    return str(backend).lower() if str(backend).lower() in ("gloo", "fake") else "gloo"
