"""Which lost updates are a fault, which are advice and which are ignored, from given counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_trainloop.checks.numerics.parameter_precision.check import parameter_precision
from pytest_trainloop.checks.numerics.parameter_precision.running_values import RunningValues
from pytest_trainloop.checks.numerics.parameter_precision.weight_averages import LostAverage, WeightAverages
from pytest_trainloop.gradients.dependence import Dependence, Dependences
from pytest_trainloop.optimizers.float32_twin import Float32Twins
from pytest_trainloop.optimizers.lost_updates import LostUpdates, RepeatedSteps
from pytest_trainloop.recording.events import Move, TensorSample
from tests.helpers.records import FakeEvidence, parameter, record

GRAD = TensorSample(0.5, b"one")


def losses(name, share, *, by_size=None, entries=100, steps=12):
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
    )


class Counted:
    """Experiments whose findings are given: of steps repeated in float64, and of a float32 twin."""

    def __init__(self, *found, twin=(), averages=(), idle=(), dtype="bfloat16", **fields):
        names = [f.name for f in (*found, *twin)]
        parameters = [parameter(i, name, dtype=dtype, **fields) for i, name in enumerate(names)]
        held = range(len(names))
        self.record = record(parameters, held=held, gradients=dict.fromkeys(held, GRAD), changed=held)
        for optimizer in self.record.optimizers:
            optimizer.from_torch = True
            optimizer.groups = tuple(0 for _ in names)
        for step in self.record.innermost_steps():
            step.lrs = (1e-3,)
        self._found, self._averages, self._idle = found, averages, set(idle)
        self.experiments = dict.fromkeys((RepeatedSteps, WeightAverages, Dependences, RunningValues), self)
        self.experiments[Float32Twins] = Counted(*twin) if twin else None

    @property
    def evidence(self):
        return FakeEvidence(self.record, shared={kind: made for kind, made in self.experiments.items() if made})

    def lost_updates(self, names, dtypes):
        return [f for f in self._found if f.name in names]

    def lost(self, dtypes=None):
        return () if dtypes is None else self._averages

    def influence(self, names):
        return {n: Dependence(0.0 if n in self._idle else 1e-2, 1e-12) for n in names}


def verdicts(counted):
    return [(f.level, f.cause, f.culprits) for f in parameter_precision(counted.evidence)]


def test_most_updates_of_all_weights_are_a_fault():
    found = list(parameter_precision(Counted(losses("a", 0.9), losses("b", 0.4, entries=50)).evidence))
    assert [(f.level, f.cause, f.culprits) for f in found] == [("fault", "updates_lost", ("a",))]
    assert "73%" in found[0].summary
    assert "1.0e-04" in found[0].measured
    assert "1.0e-03" in found[0].measured
    assert "state in bfloat16" in found[0].measured


def test_most_by_number_and_few_by_size_are_advice():
    assert verdicts(Counted(losses("a", 0.7, by_size=0.3))) == [("advice", "updates_lost_in_part", ("a",))]


def test_a_small_tensor_that_loses_nearly_all_is_a_fault_beside_a_large_one_that_loses_nothing():
    counted = Counted(losses("norm", 0.995), losses("weight", 0.0, entries=10_000))
    assert verdicts(counted) == [("fault", "updates_lost", ("norm",))]


def test_a_tensor_on_which_nothing_depends_may_lose_all():
    assert verdicts(Counted(losses("bias", 1.0, entries=1), losses("w", 0.0, entries=999), idle={"bias"})) == []


def test_most_of_what_is_lost_must_matter():
    counted = Counted(losses("a", 0.9), losses("b", 0.6, entries=20), idle={"a"})
    assert verdicts(counted) == [("advice", "updates_lost_in_part", ("a", "b"))]


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_few_lost_updates_are_ignored(share):
    assert verdicts(Counted(losses("a", share))) == []


def test_too_few_steps_prove_nothing():
    assert verdicts(Counted(losses("a", 1.0, steps=2))) == []


def test_float32_weights_are_not_looked_at():
    counted = Counted(losses("a", 1.0), dtype="float32")
    assert list(parameter_precision(FakeEvidence(counted.record, shared={RunningValues: counted}))) == []


def test_a_twin_counts_like_repeated_steps():
    assert verdicts(Counted(twin=[losses("a", 1.0)])) == [("fault", "updates_lost", ("a",))]
    assert verdicts(Counted(losses("a", 0.0), twin=[losses("b", 0.6, entries=10)])) == []
    assert verdicts(Counted(twin=[losses("a", 0.02)])) == []


def test_no_twin_where_steps_could_be_repeated():
    counted = Counted(losses("a", 0.0))
    assert Float32Twins not in counted.evidence._shared
    assert verdicts(counted) == []


def test_what_others_move_is_not_looked_at():
    counted = Counted(twin=[losses("a", 1.0)])
    counted.record.moves.append(Move(since=0, at=1, parameters=(0,), by=None))
    assert verdicts(counted) == []


def average(*names):
    return LostAverage(names, "bfloat16", 0.001, 3e-5, 1e-3, 2.7, "train.py:9   ema.lerp_(p, 0.001)")


def with_copy(**fields):
    counted = Counted(losses("a", 0.0), averages=[average("ema")])
    copied = parameter(1, "ema", dtype="bfloat16", start=TensorSample(0.5, b"\x80\x3f" * 4), **fields)
    record = counted.record
    record.parameters.append(copied)
    record.end[1] = copied.start
    return counted


def test_an_average_that_cannot_move_is_a_fault_with_its_line():
    found = list(parameter_precision(with_copy().evidence))
    assert [(f.cause, f.culprits, f.where) for f in found] == [
        ("average_lost", ("ema",), "train.py:9   ema.lerp_(p, 0.001)")
    ]
    assert "2.7 times" in found[0].measured


def test_a_copy_of_another_shape_is_no_average():
    counted = with_copy()
    counted.record.parameters[1] = replace(counted.record.parameters[1], shape=(3,))
    assert verdicts(counted) == []
