"""Records made by hand: checks are judged on them without training anything."""

import pytest

from pytest_trainloop.checks.wiring.frozen_stays_frozen.unmatched_filters import set_on_modules
from pytest_trainloop.checks.wiring.step_order.further import leak
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.tracing.asked_names import AskedNames
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.recording.events import Arrival, Backward, Place, Read, Root, Step, TensorSample
from pytest_trainloop.recording.record import Optimizer, Parameter, Record

ONE = TensorSample(0.5, b"one")
TWO = TensorSample(0.7, b"two")
ZERO = TensorSample(0.0, b"")
HERE = Place("train.py", 7, "loss.backward()")


def parameter(index, name, *, role="model", held=True, **fields):
    entry = Parameter(index, name, role, (4, 4), "float32", "cpu", True, owner=name.rpartition(".")[0], start=ONE)
    entry.calls_with_grad = 2
    for field, value in fields.items():
        setattr(entry, field, value)
    entry.asked = entry.requires_grad
    return entry


def record(parameters, *, held, gradients, batches=3, changed=()):
    """A plain loop of zeroing, backward and step over some batches: ``gradients`` maps an index to what arrives
    there."""
    at = 0
    events = []
    for _ in range(batches):
        arrivals = {i: [Arrival(at + 2, g, None, 0)] for i, g in gradients.items() if g is not None}
        roots = [Root(requires_grad=True, shape=(), value=1.0)]
        events.append(
            Backward(
                at=at + 1,
                until=at + 3,
                place=HERE,
                site=(("train.py", 7),),
                kind="backward",
                roots=roots,
                arrivals=arrivals,
            )
        )
        reads = [Read(at + 4, {i: gradients.get(i) for i in held})]
        events.append(
            Step(
                at=at + 4,
                until=at + 5,
                place=Place("train.py", 8, "optimizer.step()"),
                site=(("train.py", 8),),
                optimizer=0,
                reads=reads,
                asked=True,
                computed=True,
            )
        )
        at += 10
    return Record(
        parameters=parameters,
        optimizers=[Optimizer(0, "Adam", declared=True, parameters=tuple(held), steps=batches)],
        events=events,
        rounds=batches,
        steps=batches,
        items=batches,
        full_until=at,
        ended=True,
        end={p.index: TWO if p.index in changed else p.start for p in parameters},
    )


class FakeEvidence:
    """Evidence made by hand: ``record`` is the watched run, and ``shared`` maps each kind of experiment to what it
    found; where things were made, and what names are asked, is not known. Any other experiment fails the test."""

    offers = frozenset({"fit", "run"})
    repeatable = True

    def __init__(self, record, *, shared=None):
        known = {MadeAt.of: MadeAt(), AskedNames.of: AskedNames(), makes_own_data: False}
        known |= {leak: None, set_on_modules: []}
        self._record, self._shared, self.knobs = record, {**known, **(shared or {})}, {}

    def run(self):
        return self._record

    def declared(self, name):
        return None

    def root_causes(self, check):
        return ()

    def shared(self, kind):
        return self._shared[kind] if kind in self._shared else pytest.fail(f"{kind} was asked for")
