"""A script that starts its ranks by ``torch.multiprocessing.spawn``: each of them is watched, and rank 0 reports."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.multiprocessing

from pytest_trainloop.frontends.script_runner.stopping import Stopped
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.runs.ranks.peers import Peers, reported, store_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.frontends.script_runner.options import Options

    Run = Callable[[Options, Peers, Callable[[], None]], None]


HOST = "127.0.0.1"


class Spawning:
    """What the process does that starts the ranks: it holds the store through which they speak."""

    def __init__(self, options: Options, run: Run) -> None:
        self._options, self._run = options, run
        self._store: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Have each rank watched that is started in the block."""
        with Patches() as patches:
            for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
                patches.put(owner, "start_processes", self._around)
            yield

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if self._store is not None or given["start_method"] != "spawn" or not dist.is_available():
                return original(*args, **kwargs)
            self._store = store_at(HOST, 0, new=True)
            given["fn"] = Rank(self._run, given["fn"], self._options, self._store.port, given["nprocs"])
            context = original(**given)
            if given["join"] and self.status is not None:
                raise Stopped  # what follows would miss what the ranks were to do
            return context

        return start

    @property
    def status(self) -> int | None:
        """The exit status that rank 0 has reported; None where no rank was started, or none has reported."""
        return None if self._store is None else reported(self._store)


class Rank:
    """What each rank runs in place of the script's function."""

    def __init__(self, run: Run, function: Callable[..., Any], options: Options, port: int, ranks: int) -> None:
        self._run, self._function, self._options, self._port, self._ranks = run, function, options, port, ranks

    def __call__(self, number: int, *args: Any) -> None:
        peers = Peers(HOST, self._port, number, self._ranks)
        self._run(self._options, peers, lambda: self._function(number, *args))
