"""In which mode training passes ran, on hand-written records, where no loop of the corpus shows it."""

from __future__ import annotations

from pytest_trainloop.checks.wiring.train_mode.evaluations import without_backward
from pytest_trainloop.checks.wiring.train_mode.modes import first_in_evaluation_mode
from pytest_trainloop.recording.events import Forward, ModeCall
from tests.helpers.record_builder import RecordBuilder


class ModeRecordBuilder(RecordBuilder):
    """Steps on a model with a body and a dropout, whose mode is switched now and then."""

    def __init__(self, off=()):
        super().__init__([0])
        self.parameters[0].name, self.parameters[0].owner = "body.weight", "body"
        self.off: set[str] = set(off)
        self.training = True

    def mode(self, on, line=3):
        self.training, self.off = on, set() if on else {"drop", "norm"}
        self.add(ModeCall, line, "model.train()" if on else "model.eval()", below="", on=on)

    def forward(self, *, grad=True, line=5, **more):
        modes = {"in_eval": tuple(sorted(self.off)), "in_training": tuple(sorted({"drop", "norm"} - self.off))}
        fields = {"module": "", "grad_enabled": grad, "inference": False, "training": self.training}
        self.last = self.add(Forward, line, "model(x)", **fields, below=frozenset({0}), **more, **modes)

    def batch(self, **how):
        self.zero()
        self.forward(**how)
        self.last.answered.append(self.backward().at)
        self.step()


def judged(build, norms=frozenset(), own_train=frozenset()):
    """The modules that were trained in evaluation mode, and whether an evaluation left them so."""
    found = first_in_evaluation_mode(build.record(), norms, own_train)
    return found and found[1:]


def test_a_part_that_came_in_evaluation_mode_is_meant_where_the_rest_was_not():
    build = ModeRecordBuilder(off=["drop"])
    build.batch(unlike_parent=("drop",))
    assert judged(build) is None
    build = ModeRecordBuilder(off=["drop"])
    build.batch()
    assert judged(build) == (("drop",), False)
    assert judged(build, norms={"drop"}) is None
    assert judged(build, own_train={"drop"}) is None


def test_a_validation_with_gradients_on_is_no_training():
    build = ModeRecordBuilder()
    build.batch()
    build.mode(False)
    build.forward(line=9)
    build.mode(True)
    build.batch()
    assert judged(build) is None


def test_passes_in_training_mode_that_train_nothing_are_gathered_by_line():
    build = ModeRecordBuilder()
    build.batch()
    for grad in (True, False):
        build.forward(grad=grad, line=9)
    build.mode(False)
    build.forward(grad=False, line=12)
    (passes,) = without_backward(build.record()).values()
    assert [f.place.line for f in passes] == [9, 9]
