"""Zeroing, backward, clipping and stepping come in an order in which each step consumes just the gradients made for it.

What it does
    It keeps accounts for every parameter over a watched run: what stood in ``.grad`` before each backward, what came
    in, what the innermost optimizer step read, and who wiped it. Where the function has the knob ``accumulate``, a
    run with windows of four micro-batches is judged as well.

Why is this bad?
    A forgotten ``zero_grad()`` sums the gradients of all batches so far, a misplaced one throws away what backward
    has just computed, a clip after the step clips nothing. The loop runs, the loss moves, and the result is a worse
    model.

How it decides
    Only identities are faults. A step consumes a residual that an earlier step has already consumed and that is
    bit-identical still; steps consume nothing although a backward produced something; in every window, backward passes
    of one call site are wiped while the last of them is consumed. Gradients put there by hand are the user's own doing,
    but where one is put there once and consumed at every step while other ones arrive. Momentum kept in ``.grad`` is
    scaled, not identical; SAM moves the weights between backward and wipe; a by-product on another network's parameters
    is wiped unused; batches skipped openly come in no regular windows.

Faulty
    >>> for x, y in batches:
    ...     loss = F.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()                    # nothing zeroes the gradients

Fixed
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss = F.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()

Known limits
    Writes to gradients are seen in the first twelve steps only. A clip whose limit is infinite or above 1e5 is taken
    for a norm that is logged.

References
    https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html
    https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import be, some, they

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import Account, Ledger, Meal
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio", "every_param_moves")
ACCUMULATE = 4

CAUSES = {
    "not_zeroed": (
        "a step consumes gradients that an earlier step has consumed already, bit for bit; or they stay not finite, "
        "and all others are added to them"
    ),
    "wrong_object_zeroed": (
        "a zero_grad runs before each backward, but not on the parameters whose consumed gradients are still there"
    ),
    "zeroed_before_step": "gradients are wiped between backward and step, so steps consume nothing",
    "zeroed_inside_window": "in every window all micro-batches but the last are wiped before the step",
    "step_missing": "backward passes bring gradients, and the optimizer that holds the parameters never steps",
    "backward_missing": "the optimizer steps again and again, and no backward pass brings a gradient",
    "step_before_backward": "the step runs between the forward pass and its backward",
    "stepped_twice": "the same optimizer consumes the same gradient more than once, with no backward between",
    "gradient_kept": "steps consume one gradient that was put there by hand, while backward passes bring others",
    "two_optimizers": "two optimizers consume the same gradient of the same parameter",
    "clip_after_step": "gradients are clipped after the step has consumed them and before they are wiped",
    "scheduler_before_optimizer": (
        "in the first iteration the scheduler steps before any optimizer does, and goes on from the same line"
    ),
    "window_left_over": "the run of a loop without the knob accumulate ends with gradients that no step consumed",
}


@check(needs={"fit"}, causes=CAUSES, rank=30)
def step_order(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.step_order.call_order import call_order
    from pytest_trainloop.checks.wiring.step_order.windows import left_over, window_findings
    from pytest_trainloop.records.gradient_ledger import keep

    record = evidence.run()
    order = list(call_order(record))
    if not order and not record.backwards() and not record.steps:
        raise CannotDecide(
            f"no backward pass and no optimizer step was seen in {record.items} batches; an exception swallowed "
            "inside the loop would look like this"
        )
    ledger = keep(record)
    accounts = list(_accounts_findings(evidence, record, ledger))
    yield from [*order, *accounts]
    if "accumulate" in evidence.knobs and not accounts and record.raised is None:
        window = evidence.run(accumulate=ACCUMULATE)
        yield from window_findings(window, keep(window), ACCUMULATE)
    elif not accounts:
        yield from window_findings(record, ledger)
        yield from left_over(record, ledger)


def _accounts_findings(evidence: Evidence, record: Record, ledger: Ledger) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.step_order.empty_steps import empty_steps
    from pytest_trainloop.checks.wiring.step_order.reused_gradients import kept_gradients

    silent: set[int] = set()
    for finding, optimizers in (
        *_missing_backwards(record, ledger),
        *_missing_steps(evidence, record, ledger),
        *empty_steps(record, ledger),
        *_late_backwards(record, ledger),
        *_refused_backward(record),
    ):
        if not silent & optimizers:
            yield finding
        silent |= optimizers
    for finding, optimizers in (*_stale(record, ledger), *_repeated(record, ledger), *kept_gradients(record, ledger)):
        if not silent & optimizers:
            yield finding
        silent |= optimizers


Judged = tuple[Finding, set[int]]


def _missing_backwards(record: Record, ledger: Ledger) -> Iterator[Judged]:
    """Steps without any backward pass, gradient or movement."""
    touched = record.autograd_passes() or ledger.by_hand or record.moved_outside_steps() or record.changed()
    if len(ledger.empty) < 2 or len(ledger.empty) < len(ledger.steps) or touched or record.raised is not None:
        return
    yield (
        Finding(
            cause="backward_missing",
            summary=f"{len(ledger.empty)} optimizer steps found no gradient: no backward pass ever ran",
            measured=f"0 backward passes, {len(ledger.empty)} steps, no parameter changed",
            shown_by="no gradient arrived or was put there by hand, and every parameter is as it was",
            culprits=("loss.backward()",),
            where=str(ledger.empty[0].place),
            repair="call loss.backward() (with the parentheses) before step()",
            explains=CONSEQUENCES,
        ),
        {s.optimizer for s in ledger.empty},
    )


def _missing_steps(evidence: Evidence, record: Record, ledger: Ledger) -> Iterator[Judged]:
    """Optimizers that never step although gradients for them are produced again and again."""
    from pytest_trainloop.checks.wiring.step_order.uncalled_steps import left_not_finite, never_steps

    if record.raised is not None or any(c.what == "step" for c in record.scaler_calls()):
        return
    moved = record.moved_outside_steps() | record.changed()
    for optimizer in record.optimizers:
        if optimizer.steps:
            continue
        mine = set(optimizer.parameters) - {i for o in record.optimizers if o.steps for i in o.parameters}
        lost = [
            a
            for a in ledger.accounts
            if a.backward.reached and mine & set(a.backward.arrivals) and not mine & a.consumed
        ]
        if len(lost) < 2 or mine & moved or mine & ledger.by_hand:
            continue
        if any(a.consumed for a in lost) and not never_steps(evidence, optimizer.index, mine, lost):
            continue
        if record.steps and len(lost) < record.rounds // 2:
            continue
        left = left_not_finite(mine, lost)
        if left >= 2:
            yield _never_wiped(record, lost, left, mine), {optimizer.index}
        else:
            yield _step_missing(record, lost, optimizer.kind, mine), {optimizer.index}


def _never_wiped(record: Record, lost: list[Account], left: int, mine: set[int]) -> Finding:
    return Finding(
        cause="not_zeroed",
        summary="a gradient that is not finite is never zeroed: all later ones are added to it, and no step is made",
        measured=f"{left} of {len(lost)} backward passes bring finite gradients onto what is not finite; 0 steps",
        shown_by="what stands in .grad before these passes is inf or NaN, and what comes in is not",
        culprits=("zero_grad()", *record.names(mine)),
        where=str(lost[0].backward.place),
        repair="zero the gradients of a batch that is left out too: zero_grad() before backward(), not after step()",
        explains=(*CONSEQUENCES, "grad_scaler"),
    )


def _step_missing(record: Record, lost: list[Account], kind: str, mine: set[int]) -> Finding:
    scaled = any(c.what == "scale" for c in record.scaler_calls())
    names = record.names(mine)
    return Finding(
        cause="step_missing",
        summary=f"{len(lost)} backward passes made gradients, and the {kind} that holds the parameters made no step",
        measured=f"{len(lost)} backward passes, 0 steps, 0 of {len(mine)} parameters changed",
        shown_by="gradients arrive, nothing consumes them, and no parameter differs from its start",
        culprits=("scaler.step(optimizer)" if scaled else "optimizer.step()", *names),
        where=str(lost[0].backward.place),
        repair="call scaler.step(optimizer) and scaler.update() after backward()"
        if scaled
        else "call optimizer.step() after backward()",
        explains=CONSEQUENCES,
    )


def _late_backwards(record: Record, ledger: Ledger) -> Iterator[Judged]:
    """Backward passes whose forward pass lies before the last step on the same parameters."""
    late: dict[int, list[Account]] = defaultdict(list)
    settled: Counter[int] = Counter()
    held = record.held
    for account in ledger.accounts:
        consumed = account.consumed
        owners = {o for i in consumed for o in held.get(i, ())}
        settled.update(owners)
        behind = {i for i in consumed if any(a.steps_since_forward > 0 for a in account.backward.arrivals[i])}
        if behind and 2 * len(behind) >= len(consumed):
            for o in {o for i in behind for o in held.get(i, ())}:
                late[o].append(account)
    for index, accounts in late.items():
        steps = [s for s in ledger.steps if s.optimizer == index and not s.in_backward]
        if len(accounts) < 2 or 2 * len(accounts) < settled[index] or not steps:
            continue
        between = next((s for s in reversed(steps) if s.at < accounts[0].backward.at), steps[0])
        yield (
            Finding(
                cause="step_before_backward",
                summary=(
                    "step() runs between the forward pass and its backward(): each step consumes the gradient of "
                    "an earlier batch, made at older weights"
                ),
                measured=(
                    f"{len(accounts)} of {settled[index]} backward passes belong to a forward pass before the last step"
                ),
                shown_by=(
                    "the parameters were stepped after their module's forward call and before the gradient arrived"
                ),
                culprits=("optimizer.step()", *record.names({i for a in accounts for i in a.consumed})),
                where=str(between.place),
                repair="order: zero_grad(), forward, backward(), step()",
                explains=CONSEQUENCES,
            ),
            {index},
        )


def _refused_backward(record: Record) -> Iterator[Judged]:
    """Backward passes that torch refused because a step had changed the weights that they need."""
    if (
        record.raised is None
        or "modified by an inplace operation" not in record.raised.message
        or not record.backwards()
    ):
        return
    refused = record.backwards()[-1]
    forward = max((f.at for f in record.root_forwards() if f.at < refused.at), default=0)
    between = [s for s in record.innermost_steps() if forward < s.at < refused.at]
    if between:
        yield (
            Finding(
                cause="step_before_backward",
                summary=(
                    "step() runs between the forward pass and its backward(): the weights that backward needs are "
                    "changed by then, and torch refuses"
                ),
                measured=(
                    f"{len(between)} optimizer steps between the forward pass and its backward; torch raised: "
                    f"{record.raised.summary[:120]}"
                ),
                shown_by="order seen: forward, step, backward",
                culprits=("optimizer.step()", *record.names(record.optimizers[between[0].optimizer].parameters)),
                where=str(between[0].place),
                repair="order: zero_grad(), forward, backward(), step()",
                explains=CONSEQUENCES,
            ),
            {s.optimizer for s in between},
        )


def _ours(meal: Meal, ledger: Ledger) -> bool:
    """Whether old gradients are judged here: not those put there by hand, nor what is left of a parameter's own
    training when it is frozen (frozen_stays_frozen)."""
    return meal.parameter not in ledger.by_hand and meal.parameter not in meal.step.resting


def _repeated(record: Record, ledger: Ledger) -> Iterator[Judged]:
    """Gradients that are consumed again with no backward between."""
    pairs: dict[tuple[int, int], list[tuple[Step, int]]] = defaultdict(list)
    for meal in ledger.meals:
        if meal.repeated and meal.stale is not None and _ours(meal, ledger):
            pairs[meal.stale.optimizer, meal.step.optimizer].append((meal.step, meal.parameter))
    for (first, second), meals in pairs.items():
        steps = {s.at: s for s, _ in meals}
        if len(steps) < 2:
            continue
        names = record.names({i for _, i in meals})
        two = first != second
        kinds = f"{record.optimizers[first].kind} and {record.optimizers[second].kind}"
        yield (
            Finding(
                cause="two_optimizers" if two else "stepped_twice",
                summary=f"{some(names)} {be(names)} stepped twice on the same gradient"
                + (f", by {kinds}" if two else ""),
                measured=f"{len(steps)} steps consumed a gradient that the step before had consumed",
                shown_by="the gradient consumed is bit-identical, and no backward ran between the two steps",
                culprits=names,
                where=str(next(iter(steps.values())).place),
                repair="hold each parameter in one optimizer"
                if two
                else "call step() once for each backward pass (or window)",
                explains=CONSEQUENCES,
            ),
            {first, second},
        )


def _stale(record: Record, ledger: Ledger) -> Iterator[Judged]:
    """Gradients that are consumed together with what an earlier step has consumed already."""
    stale: dict[int, dict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for meal in ledger.meals:
        if meal.stale is not None and not meal.repeated and _ours(meal, ledger):
            stale[meal.step.optimizer][meal.parameter].append(meal.step)
    for index, by_parameter in stale.items():
        again = {i: steps for i, steps in by_parameter.items() if len(steps) >= 2}
        if not again:
            continue
        names = record.names(again)
        most = max(len({s.at for s in steps}) for steps in again.values())
        total = len([s for s in ledger.steps if s.optimizer == index])
        wrong = record.zeroing_elsewhere(set(again), index, before=next(iter(again.values()))[-1].at)
        where = wrong.place if wrong else next(iter(again.values()))[0].place
        yield (
            Finding(
                cause="wrong_object_zeroed" if wrong else "not_zeroed",
                summary=f"{some(names)} {be(names)} stepped with the gradients of all earlier batches added in: "
                + (
                    f"the zero_grad() that runs zeroes something else than {they(names)}"
                    if wrong
                    else "nothing zeroes them"
                ),
                measured=f"{most} of {total} steps consumed a residual that the step before had consumed",
                shown_by="what stands in .grad before backward is bit-identical to what the last step consumed",
                culprits=names,
                where=str(where),
                repair="zero the optimizer (or the module) that holds these parameters"
                if wrong
                else "call optimizer.zero_grad() before backward()",
                explains=CONSEQUENCES,
            ),
            {index},
        )
