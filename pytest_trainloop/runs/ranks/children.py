"""The processes of one launch: started, heard, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.multiprocessing as multiprocessing

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.runs.ranks.child import ASK_FOR_STACK, main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

OFTEN = 0.1
"""Seconds between two looks at whether a process has ended in silence."""

MOST_OUTPUT = 20_000
"""Characters of a process' output that are kept, its last ones."""


class Children:
    """``ranks`` processes that run ``work(rank)``. On leaving the block all of them are ended, with their own."""

    def __init__(self, work: Callable[[int], Any], ranks: int, seconds: float, *, fork: bool) -> None:
        self._work, self._ranks, self._seconds = work, ranks, seconds
        self._context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self._folder = Path()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._heard: set[int] = set()
        """The ranks that have nothing more to say."""

    def __enter__(self) -> Children:
        self._folder = Path(tempfile.mkdtemp(prefix="rank-"))
        try:
            for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
                with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or a closed one
                    stream.flush()  # type: ignore[union-attr]
            for rank in range(self._ranks):
                self._start(rank)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def _start(self, rank: int) -> None:
        here, there = self._context.Pipe()
        arguments = (rank, self._ranks, str(self._folder), there, self._work, self._seconds, os.getpid())
        others = (*self._connections, here) if self._context.get_start_method() == "fork" else ()
        process = self._context.Process(target=main, args=(*arguments, others), name=f"rank {rank}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of forks where threads run: the child uses only its own
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CannotDecide(
                f"the processes of several ranks are spawned where a GPU is at hand, and what they run cannot be "
                f"pickled ({error}): hide the GPU, CUDA_VISIBLE_DEVICES= pytest ..."
            ) from error
        except AssertionError as error:  # as multiprocessing words it
            raise CannotDecide(f"several ranks need processes of their own, and {error}") from error
        finally:
            there.close()
        self._processes.append(process)
        self._connections.append(here)
        with contextlib.suppress(OSError):
            os.setpgid(process.pid, process.pid)  # the child does so too: whoever comes first

    def messages(self, deadline: float) -> Iterator[tuple[int, str, Any]]:
        """What the ranks tell, as (rank, what, value), until none has anything to tell; "gone" is the last of each that
        ends in silence. Raises ``TimeoutError`` after the deadline, in seconds of ``time.monotonic``."""
        while len(self._heard) < self._ranks:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            of = {self._connections[r]: r for r in range(self._ranks) if r not in self._heard}
            ready = [of[c] for c in wait(list(of), min(left, OFTEN))]  # type: ignore[index]
            ready = ready or [rank for rank in of.values() if self._has_ended(rank)]
            for rank in ready:
                yield from self._said(rank)

    def _said(self, rank: int) -> Iterator[tuple[int, str, Any]]:
        connection = self._connections[rank]
        try:
            while connection.poll():
                what, value = connection.recv()
                yield rank, what, value
                if what == "end":
                    self._heard.add(rank)
                    return
        except (EOFError, OSError):
            self._heard.add(rank)
            yield rank, "gone", self._status(rank)
            return
        if self._has_ended(rank):
            self._heard.add(rank)
            yield rank, "gone", self._status(rank)

    def let_go(self, rank: int) -> None:
        """End a rank that has reported its end, with the processes that it has started: they hold its sockets too, and
        whoever waits for it hears of it when all are closed."""
        self._kill(rank)

    def result(self, rank: int) -> dict[str, Any] | None:
        """What a rank has left: its value or its exception, and its warnings."""
        path = self._folder / f"result{rank}"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def output(self, rank: int) -> str:
        """The end of what a rank and its own processes have written."""
        return _text(self._folder / f"output{rank}")[-MOST_OUTPUT:]

    def stacks(self) -> list[str]:
        """Where each rank is now, as faulthandler writes it; what it wrote of a crash for one that has ended."""
        sizes = []
        for rank, process in enumerate(self._processes):
            sizes.append(len(_text(self._folder / f"stack{rank}")))
            if not self._has_ended(rank):
                with contextlib.suppress(OSError):
                    os.kill(process.pid, ASK_FOR_STACK)
        for _ in range(20):
            texts = [_text(self._folder / f"stack{rank}") for rank in range(self._ranks)]
            if all(len(t) > size or self._has_ended(r) for r, (t, size) in enumerate(zip(texts, sizes, strict=True))):
                break
            time.sleep(0.05)
        return texts

    def _has_ended(self, rank: int) -> bool:
        """Without taking the process' status: until then nobody else gets its number, and its group can be ended."""
        pid = self._processes[rank].pid
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _status(self, rank: int) -> str:
        try:
            status = os.waitid(os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return "unknown"
        if status is None or status.si_code == os.CLD_EXITED:
            return f"exit status {0 if status is None else status.si_status}"
        return f"signal {signal.Signals(status.si_status).name}"

    def _kill(self, rank: int) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(self._processes[rank].pid, signal.SIGKILL)

    def end(self) -> None:
        """End every process and those that it has started, and remove the folder."""
        for rank in range(len(self._processes)):
            self._kill(rank)
        for process in self._processes:
            process.join()
            _wait_for_group(process.pid)
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def _wait_for_group(number: int) -> None:
    """Until the kernel is through with a process group that was killed; it may keep those that nobody asks for."""
    with contextlib.suppress(OSError):
        for _ in range(30):
            os.killpg(number, 0)
            time.sleep(0.01)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
