"""JSON reports as a session writes them, made of results, cards and pictures."""

from __future__ import annotations

from typing import Any

from pytest_trainloop.core.finding import Finding, Result, UserError
from pytest_trainloop.core.report import Report
from pytest_trainloop.core.report.json import document, environment
from pytest_trainloop.views.loop_facts.page import Card, Line
from pytest_trainloop.views.pictures.picture import Axis, Bar, Call, Curve, Mark, Picture

NOT_ZEROED = Finding(
    check="step_order",
    cause="not_zeroed",
    summary="a step uses the gradients of the step before",
    measured="in 11 of 12 steps",
    culprits=("head.weight", "head.bias", "body.weight"),
    kinds=("parameter",) * 3,
    where="train.py:5   optimizer.step()",
    change="train.py:4   loss.backward()",
    repair="optimizer.zero_grad() before backward()",
    explains=("overfit_one_batch",),
)

NOT_LEARNED = Finding(check="overfit_one_batch", cause="not_learned", summary="one fixed batch is not learned")

ODD_GROUP = Finding(check="schedule", cause="rate_stuck", summary="the rate of group 1 stays 0", level="advice")

NOTE = Finding(check="finite", cause="nan_hidden", summary="a NaN would be hidden here", level="note")

RATES = Picture(
    key="rates",
    kind="curves",
    title="Learning rates",
    look="Each group moves as its schedule says.",
    of="the watched run, 12 steps",
    checks=("schedule",),
    y=Axis(title="learning rate", scale="log"),
    curves=(
        Curve(name="group 0", x=(1, 2, 3), y=(0.1, 0.01, 0.001), role="each", stepped=True),
        Curve(name="group 1", x=(1, 2, 3), y=(0.2, None, 0.002), role="each"),
    ),
    marks=(Mark(axis="x", at=2, text="warm-up ends", where="train.py:3"), Mark(axis="y", at=0.01, text="a limit")),
)

ONE_BATCH = Picture(
    key="one_batch",
    kind="curves",
    title="Loss on one fixed batch",
    look="It falls.",
    of="12 steps",
    checks=("overfit_one_batch:not_learned", "overfit_one_batch"),
    y=Axis(title="loss"),
    curves=(
        Curve(name="the loop", x=(1, 2, 3), y=(2.3, 2.2, 2.25)),
        Curve(name="plain Adam", x=(1, 2, 3), y=(2.3, 1.2, 0.2), role="reference"),
        Curve(name="each step", x=(1, 2, 3), y=(2.3, 2.0, 2.5), role="faint"),
        Curve(name="not finite", x=(2,), y=(2.2,), role="event"),
    ),
)

UNITS = Picture(
    key="units",
    kind="bars",
    title="Dead units",
    look="Few are dead.",
    of="the watched run",
    checks=("activations_alive",),
    x=Axis(title="dead", unit="%"),
    labels=("encoder.layers.0.feed_forward.activation", "relu", "gelu"),
    bars=(Bar(name="first", values=(0, 12.5, None)), Bar(name="last", values=(1, 20, 30), role="reference")),
)

UPDATES = Picture(
    key="updates",
    kind="map",
    title="Update of each tensor",
    look="Rows are alike.",
    of="the watched run",
    checks=("update_ratio",),
    labels=("body.weight", "head.weight"),
    columns=(1, 2, 3),
    cells=((0.1, 0.01, None), (0.0, 1e-5, 0.2)),
    colour=Axis(title="|update| / |weights|", scale="log"),
    note="2 of 2 tensors",
)

STEP = Picture(
    key="one_step",
    kind="calls",
    title="The calls of one step",
    look="Gradients are cleared before backward.",
    of="the same in 12 of 12 steps",
    checks=("step_order",),
    calls=(
        Call(lane="forward", where="train.py:2", code="loss = model(batch)"),
        Call(lane="backward", where="train.py:4", code="loss.backward()", block=1, times=2),
        Call(lane="step SGD", where="train.py:5", code="optimizer.step()", block=2),
    ),
)

PICTURES = (STEP, ONE_BATCH, RATES, UNITS, UPDATES)

CARD = Card(
    (
        Line(label="model", text="42 weights in 3 tensors", where="train.py:1"),
        Line(label="  group 0", text="decay 0.1   rate 0 *", odd=True),
        Line(label="clip", text="not looked at", seen=False),
    )
)


def failed(*findings: Finding) -> Result:
    return Result(check=findings[0].check, outcome="failed", findings=findings, seconds=0.5, steps=12)


FAILING = (
    failed(NOT_ZEROED),
    failed(NOT_LEARNED),
    Result(
        check="evaluation_is_pure",
        outcome="error",
        reason="evaluate raised ValueError: bad",
        error=UserError(
            stage="evaluate", summary="ValueError: bad", traceback='  File "train.py", line 2, in f\n    loss = f()\n'
        ),
    ),
    Result(check="schedule", outcome="passed", findings=(ODD_GROUP,), seconds=0.1, steps=12),
    Result(check="finite", outcome="passed", findings=(NOTE,)),
    Result(check="causality", outcome="skipped", reason="no attention", applies=False),
    Result(check="padding_invariance", outcome="skipped", reason="no padding is known", needs="padding="),
    Result(check="determinism", outcome="unreliable", reason="two identical runs differ"),
    Result(check="memory_growth", outcome="xfailed", reason="issue 12"),
)

PASSING = (Result(check="step_order", outcome="passed", seconds=0.25, steps=4),)


def report(
    loops: dict[str, tuple[Result, ...]],
    *,
    card: Card | None = CARD,
    pictures: tuple[Picture, ...] = PICTURES,
    changes: list[str] | None = None,
) -> dict[str, Any]:
    """The data of a report on these loops, each with this card and these pictures."""
    entries = tuple(entry for loop, results in loops.items() for entry in Report.of(loop, results).entries)
    cards = {loop: {**card.to_json(), "file": "stored.txt", "changes": changes} for loop in loops} if card else {}
    drawn = {loop: [picture.to_json() for picture in pictures] for loop in loops}
    return document(Report(entries), environment(device="cpu", seed=0), cards, drawn)


def usual() -> dict[str, Any]:
    """One loop with everything that a loop may have, and one in which all is well."""
    return report({"test_train.py::test_right": PASSING, "test_train.py::test_wrong": FAILING})
