"""What the ranks of a watched script say to rank 0, and what rank 0 concludes from it while they run.

They speak through a store of torch.distributed: that of torchrun's agent, or one that the command holds for a script
which spawns its ranks. No file is made. A thread in each rank sends what happened, since the main thread may wait in a
collective for ever; that of rank 0 follows who waits for whom (``waiting``), and has all ranks come to their end where
one of them never would. No rank ends its process before rank 0 has reported: torchrun would end the others.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pytest_trainloop.runs.ranks.facts import Collective, Hang, Launch, Rank
from pytest_trainloop.runs.ranks.waiting import Waiting, same_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OURS, OVER = "trainloop", "over"
"""The first part of our keys, and the key of the exit status that rank 0 reports."""

OFTEN = 0.1
"""Seconds between two looks at what was said."""

PIECE = 4_000_000
"""Bytes of one value of a store, which takes 8 MB at most."""

WAITS = 5.0
"""Seconds of silence after which a rank waits for a collective that it has begun, and that another never enters: the
call itself may have come back, and whoever asks for its result waits."""

FEW, KEPT = 8, 100
"""Ranks that compare each call before they make it, and calls that are kept for those who come later."""

FAILED = 2.0
"""Seconds that the others have to end by themselves once one rank has failed."""

SILENT = 60.0
"""The same where others were stopped, and a rank says nothing any more."""

GOING = 10.0
"""Seconds that the others have to go."""

REPORTING = 600.0
"""Seconds that a rank waits for the report of rank 0."""


class Peers:
    """The ranks of one launch, as one of them knows them: ``number`` of ``ranks``."""

    def __init__(self, host: str, port: int, number: int, ranks: int, prefix: str = "") -> None:
        self.number, self.ranks = number, ranks
        self._store = _ours(store_at(host, port), prefix)
        self._process = os.getpid()
        self._said: deque[tuple[str, Any]] = deque()
        self._sent = 0
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._listener = Listener(self, ranks) if number == 0 else None

    @classmethod
    def of_torchrun(cls) -> Peers | None:
        """Those of the process that torchrun has started; None where another launcher did, or there is one rank."""
        known = os.environ
        ranks = known.get("WORLD_SIZE", "")
        asked = dist.is_available() and known.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not asked or not ranks.isdecimal() or int(ranks) < 2:
            return None
        try:
            port, number = int(known["MASTER_PORT"]), int(known["RANK"])
            return cls(known["MASTER_ADDR"], port, number, int(ranks), known.get("TORCHELASTIC_RESTART_COUNT", ""))
        except (KeyError, ValueError, RuntimeError):  # of torch: nobody listens there
            return None

    # every rank

    def tell(self, what: str, value: Any) -> None:
        """Say that something has happened; it is sent soon."""
        if os.getpid() == self._process:
            self._said.append((what, value))

    def wait_if_different(self, channel: str, members: tuple[int, ...], call: Collective) -> None:
        """Wait to be ended where another rank makes a different call as the n-th of a group: gloo ends the process at
        once when tensors of another size arrive. Of two ranks one sees what the other was first to say."""
        if ">" in channel or len(members) > FEW or os.getpid() != self._process:
            return
        with contextlib.suppress(RuntimeError):
            key = f"{channel} {call.number % KEPT}"
            self._store.set(f"{key} {self.number}", pickle.dumps(call))
            for other in members:
                if other == self.number or not self._store.check([f"{key} {other}"]):
                    continue
                theirs = pickle.loads(self._store.get(f"{key} {other}"))
                if theirs.number == call.number and not same_call(call, theirs):
                    threading.Event().wait()

    @contextlib.contextmanager
    def listening(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Send what is said in the block. ``give_up`` is called, in another thread, where this rank would not come to
        its end; it does not return."""
        thread = threading.Thread(target=self._listen, args=(give_up,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            if threading.current_thread() is not thread and os.getpid() == self._process:
                with self._sending:  # where the other thread gives up, this one has no more to say
                    self._ended.set()
                thread.join()

    def _listen(self, give_up: Callable[[], None]) -> None:
        while not self._ended.wait(OFTEN):
            with self._sending, contextlib.suppress(RuntimeError):  # torchrun has ended: it ends this process as well
                self._exchange()
                if not self._ended.is_set() and self._is_to_end():
                    give_up()

    def _exchange(self) -> None:
        if self._listener is not None:
            self._listener.look()
        else:
            self._send()

    def _is_to_end(self) -> bool:
        if self._listener is not None:
            return self._listener.ending
        return bool(self._store.check([f"end{self.number}"]))

    def spoken(self) -> list[tuple[str, Any]]:
        """What was said since the last call."""
        return [self._said.popleft() for _ in range(len(self._said))]

    def flush(self) -> None:
        """Send what was said, at once."""
        with contextlib.suppress(RuntimeError):
            self._exchange()

    def _send(self) -> None:
        if not (said := self.spoken()):
            return
        text = pickle.dumps(said)
        for start in range(0, len(text), PIECE):
            last = start + PIECE >= len(text)
            self._store.set(f"{self.number}/{self._sent}", (b"." if last else b"+") + text[start : start + PIECE])
            self._sent += 1

    def leave(self) -> None:
        """Send all that was said, and wait for the report."""
        with contextlib.suppress(RuntimeError):
            self._send()
            until = time.monotonic() + REPORTING
            while time.monotonic() < until and not self._store.check([OVER]):
                time.sleep(OFTEN)
            self._store.add("leaving", 1)

    # rank 0

    def gathered(self) -> Launch:
        """What all ranks did, once they have come to their end. ``Rank.value`` is what each said as its "result"."""
        while self._listener is not None and not self._listener.complete:
            self._listener.look()
            time.sleep(OFTEN / 2)
        return Launch(()) if self._listener is None else self._listener.launch()

    def failures(self) -> dict[int, str]:
        """How the script failed, by rank, in the order in which it was heard."""
        return {} if self._listener is None else self._listener.failures

    def ended(self) -> dict[int, str]:
        """The line at which a rank was that had to be ended."""
        return {} if self._listener is None else self._listener.ended

    def report(self, status: int) -> None:
        """Let the others go; after a fault when they have gone, since torchrun ends those that are left."""
        with contextlib.suppress(RuntimeError):
            self._store.set(OVER, str(status))
            until = time.monotonic() + (GOING if status else 0.0)
            while time.monotonic() < until and self._store.add("leaving", 0) < self.ranks - 1:
                time.sleep(OFTEN)
            time.sleep(OFTEN * (10 if status else 0))

    def end(self, rank: int) -> None:
        """Have another rank come to its end."""
        self._store.set(f"end{rank}", "1")

    def heard(self, rank: int, number: int) -> bytes | None:
        """The piece of this number that another rank has sent."""
        key = f"{rank}/{number}"
        if not self._store.check([key]):
            return None
        piece = self._store.get(key)
        self._store.delete_key(key)
        return bytes(piece)


def store_at(host: str, port: int, *, new: bool = False) -> Any:
    """The store that listens there; ``new``: one of this process."""
    limit = timedelta(seconds=30)
    return dist.TCPStore(host, port, is_master=new, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]


def _ours(store: Any, prefix: str = "") -> Any:
    return dist.PrefixStore(OURS + prefix, store)  # type: ignore[attr-defined]


def reported(store: Any) -> int | None:
    """The exit status that rank 0 has reported through a store; None before it does."""
    ours = _ours(store)
    return int(ours.get(OVER)) if ours.check([OVER]) else None


class Listener:
    """What rank 0 has heard."""

    def __init__(self, peers: Peers, ranks: int) -> None:
        self._peers = peers
        self._waiting = Waiting(ranks)
        self._pieces = [b""] * ranks
        self._read = [0] * ranks
        self._last = [time.monotonic()] * ranks
        """When each was heard."""
        self._collectives: list[list[Collective]] = [[] for _ in range(ranks)]
        self._steps = [0] * ranks
        self._results: dict[int, Any] = {}
        self._gone: dict[int, tuple[str, float]] = {}
        self._to_end: dict[int, float] = {}
        """Which ranks are to come to their end, and since when."""
        self.failures: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self._hang: Hang | None = None

    def look(self) -> None:
        """Hear what was said, and decide who is to come to its end."""
        now = time.monotonic()
        for rank in range(len(self._read)):
            for what, value in self._heard(rank):
                self._last[rank] = now
                self._take(rank, what, value, now)
        if self._is_hopeless(now):
            for rank in range(len(self._read)):
                if rank not in self._gone and rank not in self._to_end:
                    self._to_end[rank] = now
                    if rank:
                        self._peers.end(rank)

    def _heard(self, rank: int) -> Iterator[tuple[str, Any]]:
        if rank == 0:
            yield from self._peers.spoken()
            return
        while (piece := self._peers.heard(rank, self._read[rank])) is not None:
            self._read[rank] += 1
            self._pieces[rank] += piece[1:]
            if piece[:1] == b".":
                said, self._pieces[rank] = pickle.loads(self._pieces[rank]), b""
                yield from said

    def _take(self, rank: int, what: str, value: Any, now: float) -> None:
        if what == "collective":
            channel, members, call = value
            self._collectives[rank].append(call)
            self._waiting.entered(rank, channel, members, call)
            self._hang = self._hang or self._waiting.different(rank, channel, call)
            return
        self._waiting.went_on(rank)
        if what == "step":
            self._steps[rank] = value
        elif what == "result":
            self._results[rank] = value
        elif what == "end" and rank in self._to_end:
            self.ended[rank] = value[2]
        elif what == "end":
            how, failure, _ = value
            self._gone[rank] = how, now
            self._waiting.gone(rank, "left" if how == "stopped" else how)
            if failure:
                self.failures[rank] = failure

    def _is_hopeless(self, now: float) -> bool:
        """Whether some rank never comes to its end by itself."""
        if self._hang is not None:
            return True
        if any(how == "raised" and now - since > FAILED for how, since in self._gone.values()):
            return True
        hang = self._waiting.stuck()
        if hang is None and (doomed := self._waiting.doomed()) and now - self._last[doomed.rank] > WAITS:
            hang = doomed
        if hang is not None:
            self._hang = hang
            return True
        left = [rank for rank in range(len(self._read)) if rank not in self._gone]
        stopped = any(how == "stopped" for how, _ in self._gone.values())  # else a rank may evaluate alone at the end
        return stopped and all(now - self._last[rank] > SILENT for rank in left)

    @property
    def ending(self) -> bool:
        """Whether rank 0 itself is to come to its end."""
        return 0 in self._to_end

    @property
    def complete(self) -> bool:
        """Whether every rank has given its result, or does not answer."""
        now = time.monotonic()
        return all(
            rank in self._results or (rank in self._to_end and now - self._to_end[rank] > SILENT)
            for rank in range(len(self._read))
        )

    def launch(self) -> Launch:
        """What the ranks did."""
        ranks = (
            Rank(number, value=self._results.get(number), collectives=tuple(calls), steps=steps)
            for number, (calls, steps) in enumerate(zip(self._collectives, self._steps, strict=True))
        )
        return Launch(tuple(ranks), self._hang, (self._hang.rank,) if self._hang else ())
