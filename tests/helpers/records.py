"""Records made by hand: checks are judged on them without training anything."""

from typing import ClassVar

from pytest_trainloop.gradients.dependence import Dependence
from pytest_trainloop.recording.events import Arrival, Backward, Fact, Place, Read, Root, Step
from pytest_trainloop.recording.record import Optimizer, Parameter, Record

ONE = Fact(0.5, b"one")
TWO = Fact(0.7, b"two")
ZERO = Fact(0.0, b"")
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


class Given:
    """Evidence with answers given beforehand."""

    options: ClassVar = {}
    offers = frozenset({"fit", "run"})

    def __init__(self, record, *, depends=(), cut=None, touched=(), exposed=(), saddle=None, window=None):
        self._record, self._depends, self._cut = record, set(depends), cut
        self._touched, self._exposed, self._saddle, self._window = set(touched), set(exposed), saddle or {}, window

    def run(self, **knobs):
        return self._window if knobs else self._record

    def has_knob(self, name):
        return self._window is not None

    def dependence(self, names):
        return {n: Dependence(1e-2 if n in self._depends else 0.0, 1e-12) for n in names}

    def cut(self, names, kinds):
        return self._cut, self._touched

    def exposed(self, names):
        return self._exposed & set(names)

    def starts_at_saddle(self, names):
        return self._saddle
