"""Steps that find no gradient, although backward passes made some: wiped, or written over with zeros."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import GradWrite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Backward, Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import Account, Ledger

CONSEQUENCES = ("overfit_one_batch", "update_ratio", "every_param_moves")


def empty_steps(record: Record, ledger: Ledger) -> Iterator[tuple[Finding, set[int]]]:
    """Optimizers most of whose steps consume nothing, although backward passes brought gradients for them."""
    empty, every = Counter(s.optimizer for s in ledger.empty), Counter(s.optimizer for s in ledger.steps)
    for index, count in empty.items():
        mine = set(record.optimizers[index].parameters)
        lost = [a for a in ledger.accounts if mine & a.wiped and not mine & a.consumed and _finite(a, mine)]
        if count < 2 or 2 * count < every[index] or len(lost) < 2 or mine & ledger.by_hand:
            continue
        first = next(s for s in ledger.steps if s.optimizer == index)
        wipe = record.wipe_after(lost[0].backward, mine)
        names = record.names(set().union(*(mine & a.wiped for a in lost)))
        step = str(first.place)
        measured = (
            f"{count} of {every[index]} steps consumed no gradient; {len(lost)} backward passes were wiped unused"
        )
        before, until = lost[0].backward.until, wipe.at if wipe else float("inf")
        found_zero = next((s for s in ledger.empty if s.optimizer == index and before < s.at < until), None)
        if found_zero is not None:
            yield _made_zero(record, lost[0].backward, found_zero, mine, measured, names), {index}
        elif first.at < lost[0].backward.at:
            yield (
                Finding(
                    cause="step_before_backward",
                    summary=(
                        f"step() runs before backward(): {count} of {every[index]} steps found no gradient to consume"
                    ),
                    measured=measured,
                    shown_by=(
                        "the first step comes before the first backward, and what backward brings is wiped before "
                        "the next step"
                    ),
                    culprits=("optimizer.step()", *names),
                    where=step,
                    repair="order: zero_grad(), forward, backward(), step()",
                    explains=CONSEQUENCES,
                ),
                {index},
            )
        else:
            yield (
                Finding(
                    cause="zeroed_before_step",
                    summary=(
                        f"gradients are zeroed between backward() and step(): {count} of {every[index]} steps found "
                        "nothing to consume"
                    ),
                    measured=measured,
                    shown_by=f"order seen: backward, {wipe.by if wipe else 'zeroing'}, step",
                    culprits=(wipe.by if wipe else "zero_grad()", *names),
                    where=str(wipe.place if wipe else lost[0].backward.place),
                    repair="call zero_grad() before backward() or after step(), never between the two",
                    explains=CONSEQUENCES,
                ),
                {index},
            )


def _finite(account: Account, mine: set[int]) -> bool:
    """Whether what the pass brought is: what is not may be cleaned away (finite)."""
    arrivals = account.backward.arrivals
    return all(a.incoming.finite for index in mine for a in arrivals.get(index, ()))


def _made_zero(
    record: Record, backward: Backward, step: Step, mine: set[int], measured: str, names: tuple[str, ...]
) -> Finding:
    """The order is right, and what arrived is zero when the step reads it: written over in between, or by a hook."""
    writes = [w for w in record.of(GradWrite) if backward.at < w.at < step.at and mine & set(w.parameters)]
    by = f"{writes[-1].by}()" if writes and writes[-1].by else "a hook on the gradients"
    return Finding(
        cause="zeroed_before_step",
        summary=f"{by} leaves gradients of exactly 0 between backward() and step(): nothing is left to consume",
        measured=measured,
        shown_by=f"order seen: backward with gradients that are not zero, {by}, step with zeros",
        culprits=(by, *names),
        where=str(writes[-1].place if writes else step.place),
        repair=(
            "look at what it multiplies by, and in which dtype: a norm that overflows gives a factor of 0, and "
            "float16 holds nothing below 6e-8"
        ),
        explains=CONSEQUENCES,
    )
