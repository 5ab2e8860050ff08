"""The same run again: bit for bit the same, or where it first differs.

Two runs in one process may differ because something outside the function lives on between them: a generator at module
level, a cache, a counter. Started twice as two processes such a loop is the same each time. So a difference is looked
at again in two forked children, which begin from one and the same state.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import select
import signal
import time
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from pytest_trainloop.checks.learning.loss_curve import Losses
from pytest_trainloop.checks.state.determinism.first_difference import CallLog, FirstCall
from pytest_trainloop.core.errors import TimeRanOut
from pytest_trainloop.core.whose import is_ours, mistake
from pytest_trainloop.recording.events import Backward, Event, Step
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.second_run import SecondRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import TensorSample
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

LATE = b"late"
"""What a child says whose time ran out."""

MISTAKEN = b"mistake"
"""What it says before a pickled mistake of this package."""

Source = Literal["random", "nondeterministic_kernel", "kept", "settled", "unknown"]
"""``settled``: something lived on from the first run to the second, and no longer changes after it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which two records differ."""

    what: str
    """In words."""
    culprit: str
    """By its name."""
    step: int
    """Optimizer steps made before it."""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Two runs of one plan: ``difference`` is None where they are the same bit for bit."""

    difference: Difference | None
    source: Source = "unknown"
    first_call: FirstCall | None = None
    losses: tuple[tuple[float, ...], ...] = ()
    """Those of the two runs where they differ."""


def repetition(evidence: Evidence) -> Repetition:
    """Make the watched run again and compare the two; look for the source where they differ."""
    first, second = evidence.run(), evidence.shared(SecondRun).record
    if second is not None and not evidence.kept_batches and first_difference(first, second) is None:
        return Repetition(None)
    with preserved():
        return _repetition(first, replace(evidence.plan(), kept=None), evidence.rerun)


def _repetition(first: Record, plan: RunPlan, run: Callable[[RunPlan], Record]) -> Repetition:
    plan = replace(plan, may_raise=True)  # once and not again is a difference
    second = run(plan)
    difference = first_difference(first, second)
    if difference is None:
        return Repetition(None)
    losses = tuple(tuple(Losses(record).read()) for record in (first, second))
    return replace(_with_its_source(difference, plan, run), losses=losses)


def _with_its_source(difference: Difference, plan: RunPlan, run: Callable[[RunPlan], Record]) -> Repetition:
    with _deterministic():
        pair = [run(plan) for _ in range(2)]
    if first_difference(*pair) is None:
        settled = first_difference(*(run(plan) for _ in range(2))) is None
        return Repetition(difference, "settled" if settled else "nondeterministic_kernel")
    digests = _in_children(plan, run)
    if digests is None:
        return Repetition(difference, "unknown")
    if digests[0] == digests[1]:
        return Repetition(difference, "kept")
    logs = [CallLog(), CallLog()]
    for log in logs:
        run(replace(plan, contexts=log.contexts))
    return Repetition(difference, "random", logs[0].first_difference(logs[1]))


def first_difference(a: Record, b: Record) -> Difference | None:
    """Compare two records up to the last step that both made."""
    for p, q in zip(a.parameters, b.parameters, strict=False):
        if p.name == q.name and p.declared and not p.start.same(q.start):
            return Difference(f"the initial {p.name}", p.name, 0)
    steps = 0
    for mine, other in zip(_until_last_step(a), _until_last_step(b), strict=False):
        if type(mine) is not type(other):
            return Difference("the order of events", "fit", steps, str(mine.place))
        if isinstance(mine, Backward) and isinstance(other, Backward) and (found := _backwards(a, mine, other)):
            return Difference(*found, steps, str(mine.place))
        if isinstance(mine, Step) and isinstance(other, Step):
            if found := _steps(a, mine, other):
                return Difference(*found, steps, str(mine.place))
            steps += 1
    raised = [record.raised for record in (a, b) if record.raised is not None]
    if len(raised) == 1:
        return Difference(f"whether fit raises ({raised[0].summary})", "fit", steps, str(raised[0].place))
    return None


def _until_last_step(record: Record) -> Iterator[Event]:
    watched = [e for e in record.events if isinstance(e, (Backward, Step)) and e.at <= record.full_until]
    last = max((i for i, e in enumerate(watched) if isinstance(e, Step)), default=len(watched))
    return iter(watched[: last + 1])


def _backwards(record: Record, a: Backward, b: Backward) -> tuple[str, str] | None:
    """What differs, and its name."""
    for x, y in zip(a.roots, b.roots, strict=False):
        if x.shape != y.shape or not _same(x.value, y.value):
            return f"the loss ({x.value:.9g}, then {y.value:.9g})", "loss"
    for index in a.arrivals.keys() & b.arrivals.keys():
        for arrival, other in zip(a.arrivals[index], b.arrivals[index], strict=False):
            if not arrival.incoming.same(other.incoming):
                return f"the gradient of {record.name(index)}", record.name(index)
    return None


def _steps(record: Record, a: Step, b: Step) -> tuple[str, str] | None:
    if not all(map(_same, a.lrs, b.lrs)):
        return f"the learning rate ({a.lrs[0]:.9g}, then {b.lrs[0]:.9g})", "lr"
    for read, other in zip(a.reads, b.reads, strict=False):
        for index in read.grads.keys() & other.grads.keys():
            if not _same_sample(read.grads[index], other.grads[index]):
                return f"the gradient of {record.name(index)} that the step used", record.name(index)
    for index in a.left.keys() & b.left.keys():
        if not _same_sample(a.left[index], b.left[index]):
            return f"the gradient of {record.name(index)} after the step", record.name(index)
    return None


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def _same_sample(a: TensorSample | None, b: TensorSample | None) -> bool:
    return a is b if a is None or b is None else a.same(b)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """One thread and deterministic kernels; put back by ``preserved``."""
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])


def _in_children(plan: RunPlan, run: Callable[[RunPlan], Record]) -> tuple[bytes, bytes] | None:
    """Digests of the run as two children make it from the same state; None where a process cannot be forked safely."""
    if not hasattr(os, "fork") or (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    digests = []
    for _ in range(2):
        digest = _in_child(lambda: _digest(run(plan)), plan.timeout)
        if digest == LATE:
            raise TimeRanOut(0, plan.timeout, where=" of a run in a process of its own")
        digests.append(digest or b"")
    return None if b"" in digests else (digests[0], digests[1])


def _in_child(work: Callable[[], bytes], seconds: float) -> bytes | None:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks where threads run: the child uses only its own
        pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            os.write(write, work())
        except TimeRanOut:
            os.write(write, LATE)
        except BaseException as error:  # of the project's loop, which has run twice in this process before
            if is_ours(error):
                sent = mistake(error)
                sent.traceback = sent.traceback[-select.PIPE_BUF // 2 :]  # what is written at once is read at once
                os.write(write, MISTAKEN + pickle.dumps(sent))
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], seconds)
        said = os.read(read, select.PIPE_BUF) if ready else LATE
    finally:
        os.close(read)
        _reap(pid)
    if said.startswith(MISTAKEN):
        raise pickle.loads(said.removeprefix(MISTAKEN))
    return said or None


def _reap(pid: int) -> None:
    """Wait for a child that is through; end one that is not."""
    for _ in range(100):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _digest(record: Record) -> bytes:
    digest = hashlib.sha256()
    for parameter in record.parameters:
        digest.update(parameter.start.raw)
        digest.update(record.end[parameter.index].raw if parameter.index in record.end else b"")
    for backward in record.of(Backward):
        digest.update(repr([root.value for root in backward.roots]).encode())
    return digest.digest()
