"""Two runs under one seed are the same, bit for bit.

What it does
    It builds the loop and runs it a second time, with python's, numpy's and torch's generators seeded alike, and
    compares weights, losses, gradients and rates of every step that was watched.

Why is this bad?
    A run that cannot be repeated cannot be debugged, a resumed one cannot be compared, and every comparison of two
    variants measures the noise as well.

How it decides
    Bits are equal or they are not. Where they are not, the run is made again with one thread and deterministic kernels:
    if that is repeatable, and runs as they are still differ, a kernel sums in another order each time (advice; CUDA's
    atomics do so by design). Then two
    child processes make it from one and the same state: where they agree, something outside the function lives on
    from run to run in one process (a generator at module level, a cache), which a fresh process does not have (advice).
    What is left draws from a source that no seed reaches; the first call of torch that differs is shown.

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
    source is not looked for, and nothing is called a fault. What differs from one start of Python to the next (the
    order of a set of strings, the process's number) is the same in both runs and is not seen; what hangs on addresses
    in memory (the order of a set of objects) differs here and not in the children: advice.

References
    https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.determinism.repeat import Repetition
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "unseeded_random": "two child processes that begin from one state and one seed come to different bits",
    "nondeterministic_kernel": "with one thread and deterministic kernels the runs agree, and as they are they do not",
    "state_outside_loop": "two runs in one process differ, and two processes that begin alike agree, or later runs do",
}


@check(needs={"run"}, causes=CAUSES, rank=10)
def determinism(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.determinism.repeat import repetition

    if "nondeterministic" in evidence.offers and evidence.declared("nondeterministic"):
        raise CannotDecide("nondeterministic=True says that runs differ on purpose")
    again = evidence.shared(repetition)
    if again.difference is None:
        return
    if again.source == "unknown":
        raise CannotDecide(
            f"two runs differ ({again.difference.what} at step {again.difference.step}), and no process can be forked "
            "here to tell an unseeded source from state that lives on; run on the CPU to know"
        )
    yield {"nondeterministic_kernel": _kernel, "kept": _kept, "settled": _kept, "random": _random}[again.source](again)


def _measured(again: Repetition) -> str:
    difference = again.difference
    return f"first to differ: {difference.what}, {_when(difference.step)}" if difference else ""


def _culprits(again: Repetition) -> tuple[str, ...]:
    return (again.difference.culprit,) if again.difference else ()


def _when(step: int) -> str:
    return "before any optimizer step" if step == 0 else f"after {step} optimizer steps"


def _random(again: Repetition) -> Finding:
    difference = again.difference
    by_call = difference is not None and difference.culprit != "lr" and (difference.step or difference.where)
    op = again.op if by_call else None
    shown = "two child processes started from the same state differ too"
    if op is not None:
        inside = f" in {op.module}" if op.module else ""
        given = "is given the same both times and gives" if op.given_same else "is given"
        shown += f"; the first call of torch to differ is {op.op}(){inside}, which {given} something else"
    where = str(op.place) if op is not None else again.difference.where if again.difference else ""
    return Finding(
        cause="unseeded_random",
        summary="two runs under one seed differ: something draws from a source that no seed reaches",
        measured=_measured(again),
        shown_by=shown,
        culprits=(op.op,) if op is not None else _culprits(again),
        where=where,
        repair=(
            "seed it inside the function: np.random.default_rng(seed), torch.Generator().manual_seed(seed), "
            "random.Random(seed); take no number from time, uuid or the system"
        ),
    )


def _kernel(again: Repetition) -> Finding:
    return Finding(
        cause="nondeterministic_kernel",
        level="advice",
        summary="two runs under one seed differ by the order in which a kernel sums",
        measured=_measured(again),
        shown_by="with one thread and torch.use_deterministic_algorithms(True) two runs are the same",
        culprits=_culprits(again),
        where=again.difference.where if again.difference else "",
        repair="torch.use_deterministic_algorithms(True) where runs must be repeatable",
    )


def _kept(again: Repetition) -> Finding:
    return Finding(
        cause="state_outside_loop",
        level="advice",
        summary="two runs in one process differ: something outside the function lives on from one to the next",
        measured=_measured(again),
        shown_by=(
            "the first run differs from the second, and later ones are all the same"
            if again.source == "settled"
            else "two child processes that begin from the same state are the same"
        ),
        culprits=_culprits(again),
        where=again.difference.where if again.difference else "",
        repair="make generators, caches and counters inside the function (or in what it builds)",
    )
