"""A script on several ranks: each of them is watched, and rank 0 reports."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pytest_trainloop.checks.scale.distributed_equivalence.script_runs import ScriptRank, script_noted, watched_launch
from pytest_trainloop.core.report import Report
from pytest_trainloop.runs.ranks.collectives import Log
from pytest_trainloop.runs.ranks.facts import LOST, Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_trainloop.core.finding import Result
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.ranks.peers import Peers


class OneOfRanks:
    """What a session adds where its process is one rank of several."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._result = ScriptRank()
        self._launch = Launch(())
        self._faults: list[tuple[int, Result]] = []

    @property
    def reports(self) -> bool:
        return self._peers.number == 0

    @contextlib.contextmanager
    def noted(self, watch: Watch, give_up: Callable[[], None]) -> Iterator[None]:
        """Note what the script does here, and tell rank 0. ``give_up`` is called where it would never end."""
        Log(self._tell).begin()  # for the rest of the process
        with self._peers.listening(give_up), script_noted(watch, self._result, self._peers.ranks):
            yield

    def _tell(self, what: str, value: Any) -> None:
        """Tell rank 0, but of collectives among other ranks than those that are watched (several machines)."""
        known = (self._peers.number, self._peers.ranks)
        if what != "collective":
            self._peers.tell(what, value)
        elif (dist.get_rank(), dist.get_world_size()) == known:
            self._peers.tell(what, value)
            if dist.get_backend() == "gloo":
                self._peers.wait_if_different(*value)

    def tell_end(self, failure: str, ended_at: str, *, stopped: bool) -> None:
        """Tell rank 0 how the script ended here; ``ended_at``: the line at which it was ended."""
        self._result.stopped = stopped
        self._peers.tell("end", ("raised" if failure else "stopped" if stopped else "left", failure, ended_at))
        self._peers.flush()

    def leave(self, watch: Watch, report: Report | None) -> None:
        """Give rank 0 all that was noted, and the faults that were found here; wait until it has reported."""
        self._result.record = watch.record
        faults = [r for r in report.results if r.outcome == "failed"] if report is not None else []
        self._peers.tell("result", (self._result, faults))
        self._peers.leave()

    def gather(self, watch: Watch) -> Mapping[Callable[..., Any], Any]:
        """Wait for the other ranks; what the checks of rank 0 are given of them all."""
        self._result.record = watch.record
        self._peers.tell("result", (self._result, []))
        launch = self._peers.gathered()
        given: list[Any] = [rank.value or (None, []) for rank in launch]
        self._faults = [(number, fault) for number, (_, faults) in enumerate(given) for fault in faults]
        ranks = tuple(replace(rank, value=result) for rank, (result, _) in zip(launch, given, strict=True))
        self._launch = Launch(ranks, launch.hang, launch.waiting)
        return {watched_launch: self._launch}

    def failure(self) -> str:
        """How the script failed first on some rank; not what a rank says that lost another one, if that is why."""
        failures = self._peers.failures()
        own = [(rank, text) for rank, text in failures.items() if LOST not in text]
        follows = self._launch.hang is not None or any(rank.value and rank.value.stopped for rank in self._launch)
        first = next(iter(own or ([] if follows else failures.items())), None)
        if first is None:
            return ""
        rank, text = first
        return f"on rank {rank} {text}" if rank else text

    def ended(self) -> list[str]:
        """Where the ranks were that had to be ended, since another failed."""
        return [f"rank {rank} was ended at {line}" for rank, line in self._peers.ended().items()]

    def with_others(self, report: Report) -> Report:
        """The report of rank 0 with the faults that other ranks alone have."""
        entries = list(report.entries)
        for rank, fault in self._faults:
            for number, entry in enumerate(entries):
                if entry.result.check == fault.check and entry.result.outcome in ("passed", "skipped"):
                    of_rank = [replace(f, summary=f"on rank {rank}: {f.summary}") for f in fault.findings]
                    entries[number] = replace(entry, result=replace(fault, findings=tuple(of_rank)))
        return Report(tuple(entries))

    def report(self, status: int) -> None:
        """Let the other ranks go, once the report is printed."""
        self._peers.report(status)
