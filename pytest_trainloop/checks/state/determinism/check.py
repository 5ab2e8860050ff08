"""Two runs under one seed are the same, bit for bit.

What it does
    It builds the loop and runs it a second time, with python's, numpy's and torch's generators under the same seeds. It
    compares weights, losses, gradients and learning rates of every step that was watched.

Why is this bad?
    A run that cannot be repeated cannot be debugged, a resumed one cannot be compared, and every comparison of two
    variants measures the noise as well.

How it decides
    1. Bits are equal or they are not. If they are, it passes.
    2. With one thread and deterministic kernels the run is made again. If it is repeatable now, and differs without
       these settings, a kernel sums in a different order each time: ``nondeterministic_kernel``.
    3. If later runs are all equal, and only the first differs, something outside the function lives on:
       ``state_outside_loop``.
    4. Two child processes make the run from one state. If they agree, the reason is the same: ``state_outside_loop`` (a
       generator at module level, a cache).
    5. What is left draws from a source that no seed reaches: ``unseeded_random``, a fault. The first call of torch that
       differs is shown.
    6. The causes of items 2 to 4 are advice. ``nondeterministic=False`` makes them faults, and
       ``nondeterministic=True`` turns the check off.

When it is skipped
    It skips a difference whose source needs a forked process where none can be forked.

Faulty
    >>> generator = torch.Generator()
    >>> generator.seed()                               # from the system
    >>> for x, y in batches:
    ...     x = x + 0.1 * torch.randn(x.shape, generator=generator)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Fixed
    >>> generator = torch.Generator()
    >>> generator.manual_seed(0)
    >>> for x, y in batches:
    ...     x = x + 0.1 * torch.randn(x.shape, generator=generator)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    Only the steps that are watched in full are compared. Where a process cannot be forked (Windows, CUDA in use) the
    source is not looked for, and nothing is called a fault.

    What differs from one start of Python to the next (the order of a set of strings, the process's number) is the same
    in both runs and is not seen. What depends on addresses in memory (the order of a set of objects) differs here and
    not in the children: advice.

References
    https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.determinism.repeat import Difference, Repetition
    from pytest_trainloop.core.finding import Level
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "unseeded_random": Cause(
        proof="two child processes that begin from one state and one seed come to different bits",
        repair=(
            "generator = np.random.default_rng(seed), once, where the loop is built, and draw from it (or "
            "torch.Generator().manual_seed(seed), random.Random(seed)); take no number from time, uuid or the system"
        ),
        do_not="call default_rng(seed) at each draw: every call would give the same numbers",
        change=("source of draws",),
        source="https://github.com/liznerski/fcdd/issues/40",
    ),
    "nondeterministic_kernel": Cause(
        proof="the runs agree with one thread and deterministic kernels, and differ without these settings",
        repair="torch.use_deterministic_algorithms(True) where runs must be repeatable",
        settle="nondeterministic=True says that runs may differ",
        judged="nondeterministic=False makes it a fault",
        source="https://github.com/pytorch/pytorch/issues/23151",
    ),
    "state_outside_loop": Cause(
        proof="two runs in one process differ, and two processes with the same start agree, or later runs do",
        repair="make generators, caches and counters inside the function (or in what it builds)",
        settle="nondeterministic=True says that runs may differ",
        judged="nondeterministic=False makes it a fault",
        source="https://github.com/CodefyUI/CodefyUI/issues/253",
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=10)
def determinism(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.determinism.repeat import repetition

    declared = evidence.declared("nondeterministic") if "nondeterministic" in evidence.offers else None
    level: Level = "fault" if declared is False else "advice"
    if declared:
        raise DoesNotApply("nondeterministic=True says that runs differ on purpose")
    again = evidence.shared(repetition)
    difference = again.difference
    if difference is None:
        return
    if again.source == "unknown":
        raise CannotDecide(
            f"two runs differ ({difference.what} at step {difference.step}), and no process can be forked here to "
            "distinguish an unseeded source from state that lives on; run on the CPU to know"
        )
    if again.source == "random":
        yield _unseeded(again, difference)
    elif again.source == "nondeterministic_kernel":
        yield Finding(
            cause="nondeterministic_kernel",
            level=level,
            summary="two runs under one seed differ by the order in which a kernel sums",
            measured=_measured(difference),
            shown_by="with one thread and torch.use_deterministic_algorithms(True) two runs are the same",
            culprits=(difference.culprit,),
            where=difference.where,
        )
    else:
        yield Finding(
            cause="state_outside_loop",
            level=level,
            summary="two runs in one process differ: state outside the function survives from one run to the next",
            measured=_measured(difference),
            shown_by=(
                "the first run differs from the second, and later ones are all the same"
                if again.source == "settled"
                else "two child processes that begin from the same state are the same"
            ),
            culprits=(difference.culprit,),
            where=difference.where,
        )


def _unseeded(again: Repetition, difference: Difference) -> Finding:
    by_call = difference.culprit != "lr" and (difference.step or difference.where)
    call = again.first_call if by_call else None
    shown = "two child processes started from the same state differ too"
    if call is not None:
        inside = f" in {call.module}" if call.module else ""
        given = "is given the same both times and returns" if call.given_same else "is given"
        shown += f"; the first call of torch to differ is {call.op}(){inside}, which {given} something else"
    return Finding(
        cause="unseeded_random",
        summary="two runs under one seed differ: something draws from a source that no seed reaches",
        measured=_measured(difference),
        shown_by=shown,
        culprits=(call.op if call is not None else difference.culprit,),
        where=str(call.place) if call is not None else difference.where,
    )


def _measured(difference: Difference) -> str:
    when = f"after {difference.step} optimizer steps" if difference.step else "before any optimizer step"
    return f"first to differ: {difference.what}, {when}"
