"""Which lost updates are a fault, which are advice and which are ignored, from given counts."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.numerics.parameter_precision.check import parameter_precision
from pytest_trainloop.checks.numerics.parameter_precision.runs import low_values
from pytest_trainloop.frontends.api import observe
from pytest_trainloop.instruments.gradients.dependence import Dependence, Dependences
from pytest_trainloop.instruments.optimizers.float32_twin import Float32Twins
from pytest_trainloop.instruments.optimizers.lost_updates import LostUpdates, RepeatedSteps
from pytest_trainloop.recording.events import Move, TensorSample
from tests.checks.numerics.parameter_precision.unusual import frozen_bf16_reference_of_the_same_shape
from tests.helpers.records import FakeEvidence, parameter, record

GRAD = TensorSample(0.5, b"one")


def losses(name, share, *, by_size=None, entries=100, steps=12, **fields):
    updates = 12 * entries
    return LostUpdates(
        name=name,
        dtype="bfloat16",
        entries=entries,
        state=("bfloat16",),
        steps=steps,
        sampled=updates,
        updates=updates,
        lost=round(share * updates),
        due=1.0,
        made=1.0 - (share if by_size is None else by_size),
        update=1e-4,
        ulp=1e-3,
        **fields,
    )


class Counted:
    """An experiment whose counts are given."""

    def __init__(self, found, idle=()):
        self._found, self._idle = found, idle

    def lost_updates(self, names, dtypes):
        return [f for f in self._found if f.name in names]

    def influence(self, names):
        return {n: Dependence(0.0 if n in self._idle else 1e-2, 1e-12) for n in names}


def findings(*found, twin=(), idle=(), dtype="bfloat16", moves=()):
    names = [f.name for f in (*found, *twin)]
    held = range(len(names))
    parameters = [parameter(i, name, dtype=dtype) for i, name in enumerate(names)]
    seen = record(parameters, held=held, gradients=dict.fromkeys(held, GRAD), changed=held)
    for optimizer in seen.optimizers:
        optimizer.groups = tuple(0 for _ in names)
    for step in seen.innermost_steps():
        step.lrs = (1e-3,)
    seen.moves.extend(moves)
    given = {RepeatedSteps: Counted(found), Dependences: Counted((), idle), low_values: {}}
    given |= {Float32Twins: Counted(twin)} if twin else {}
    return list(parameter_precision(FakeEvidence(seen, shared=given)))


def verdicts(*found, **how):
    return [(f.level, f.cause, f.culprits) for f in findings(*found, **how)]


def test_most_updates_of_all_weights_are_a_fault():
    (found,) = findings(losses("a", 0.9), losses("b", 0.4, entries=50))
    assert (found.level, found.cause, found.culprits) == ("fault", "updates_lost", ("a",))
    assert found.summary == "73% of all updates of bfloat16 weights are lost to rounding, most of them in a"
    assert found.measured == (
        "73% of the updates of 2 tensors; a: 90% in 12 steps, typical update 1.0e-04, ULP of bfloat16 there 1.0e-03, "
        "state in bfloat16"
    )


@pytest.mark.parametrize(
    ("found", "idle", "expected"),
    [
        ([losses("a", 0.7, by_size=0.3)], (), [("advice", "updates_lost_in_part", ("a",))]),
        ([losses("n", 0.995), losses("w", 0.0, entries=9999)], (), [("fault", "updates_lost", ("n",))]),
        ([losses("bias", 1.0, entries=1), losses("w", 0.0, entries=999)], ("bias",), []),
        ([losses("a", 0.9), losses("b", 0.6, entries=20)], ("a",), [("advice", "updates_lost_in_part", ("a", "b"))]),
        ([losses("a", 0.05)], (), []),
        ([losses("a", 1.0, steps=2)], (), []),
    ],
    ids=["few by size", "a small tensor", "nothing depends on it", "most does not matter", "a few", "too few steps"],
)
def test_what_else_is_lost(found, idle, expected):
    assert verdicts(*found, idle=idle) == expected


def test_a_twin_counts_like_repeated_steps():
    (found,) = findings(twin=[losses("a", 1.0, from_twin=True)])
    assert (found.cause, found.culprits) == ("updates_lost", ("a",))
    assert found.shown_by.startswith("12 steps on the same gradient")
    assert verdicts(losses("a", 0.0), twin=[losses("b", 0.6, entries=10)]) == []


def test_other_weights_are_not_looked_at():
    assert verdicts(losses("a", 1.0), dtype="float32") == []
    assert verdicts(twin=[losses("a", 1.0)], moves=[Move(since=0, at=1, parameters=(0,), by=None)]) == []


def test_a_resting_copy_cannot_be_judged_in_a_loop_that_was_watched_once():
    loop = frozen_bf16_reference_of_the_same_shape()
    with observe(loop.modules, loop.optimizer) as watched:
        loop.fit([loop.batch] * 4)
    (found,) = watched.check("parameter_precision").results
    assert found.outcome == "skipped"
    assert "further runs" in found.reason
