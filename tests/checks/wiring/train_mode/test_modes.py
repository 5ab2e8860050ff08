"""In which mode training passes ran, on hand-written records."""

from __future__ import annotations

from pytest_trainloop.checks.wiring.train_mode.evaluations import without_backward
from pytest_trainloop.checks.wiring.train_mode.modes import trained_in_eval
from pytest_trainloop.recording.events import Forward, ModeCall
from tests.helpers.record_builder import RecordBuilder


class ModeRecordBuilder(RecordBuilder):
    """Steps on a model with a body and a dropout, whose mode is switched now and then."""

    def __init__(self):
        super().__init__([0])
        self.parameters[0].name, self.parameters[0].owner = "body.weight", "body"
        self.off: set[str] = set()
        self.training = True

    def mode(self, on, below="", line=3):
        self.training = on if not below else self.training
        chosen = {m for m in ("drop", "norm") if below in ("", m)}
        self.off = self.off - chosen if on else self.off | chosen
        self.add(ModeCall, line, "model.train()" if on else "model.eval()", below=below, on=on)

    def forward(self, *, grad=True, line=5, module="", apart=()):
        modes = {"in_eval": tuple(sorted(self.off)), "in_training": tuple(sorted({"drop", "norm"} - self.off))}
        fields = {"module": module, "grad_enabled": grad, "inference": False, "training": self.training}
        fields |= {"below": frozenset({0}), "apart": apart}
        self.last = self.add(Forward, line, "model(x)", **fields, **modes)

    def backward(self, *on, **how):
        event = super().backward(*on, **how)
        self.last.answered.append(event.at)
        return event

    def batch(self, **how):
        self.zero()
        self.forward(**how)
        self.backward()
        self.step()


def judged(build, norms=frozenset(), own_train=frozenset()):
    found = trained_in_eval(build.record(), set(norms), set(own_train))
    return None if found is None else (found.cause, found.modules, found.step)


def test_training_mode_is_fine():
    build = ModeRecordBuilder()
    build.mode(True)
    for _ in range(3):
        build.batch()
    assert judged(build) is None


def test_evaluation_mode_from_the_start():
    build = ModeRecordBuilder()
    build.mode(False)
    build.batch()
    assert judged(build) == ("trained_in_eval", ("drop", "norm"), 0)


def test_left_on_after_a_validation():
    build = ModeRecordBuilder()
    for _ in range(2):
        build.batch()
    build.mode(False)
    build.forward(grad=False, line=9)
    build.batch()
    assert judged(build) == ("eval_left_on", ("drop", "norm"), 2)


def test_put_back_after_a_validation():
    build = ModeRecordBuilder()
    build.batch()
    build.mode(False)
    build.forward(grad=False, line=9)
    build.mode(True)
    build.batch()
    assert judged(build) is None


def test_one_part_not_put_back():
    build = ModeRecordBuilder()
    build.batch()
    for part in ("drop", "norm"):
        build.mode(False, part)
    build.forward(grad=False, line=9)
    build.mode(True, "norm")
    build.batch()
    assert judged(build) == ("eval_left_on", ("drop",), 1)


def test_norms_kept_in_evaluation_mode_are_meant():
    build = ModeRecordBuilder()
    build.mode(False, "norm")
    build.batch()
    assert judged(build, norms={"norm"}) is None


def test_a_part_switched_by_itself_is_meant():
    build = ModeRecordBuilder()
    build.mode(False, "drop")
    build.batch()
    assert judged(build) is None


def test_a_part_that_came_so_by_itself_is_meant():
    build = ModeRecordBuilder()
    build.off = {"drop"}
    build.batch(apart=("drop",))
    assert judged(build) is None
    build = ModeRecordBuilder()
    build.off = {"drop"}
    build.batch()
    assert judged(build) == ("trained_in_eval", ("drop",), 0)


def test_a_validation_with_gradients_on_is_no_training():
    build = ModeRecordBuilder()
    build.batch()
    build.mode(False)
    build.forward(line=9)
    build.off, build.training = set(), True
    build.batch()
    assert judged(build) is None


def test_a_part_switched_by_the_models_own_train_is_meant():
    build = ModeRecordBuilder()
    build.off = {"drop"}
    build.batch()
    assert judged(build, own_train={"drop"}) is None


def test_a_pass_whose_gradients_nobody_consumes_is_no_training():
    build = ModeRecordBuilder()
    build.mode(False)
    build.forward()
    build.backward()
    build.mode(True)
    build.batch()
    assert judged(build) is None


def test_passes_in_training_mode_that_train_nothing_are_gathered_by_line():
    build = ModeRecordBuilder()
    for _ in range(4):
        build.batch()
    for grad in (True, False):
        build.forward(grad=grad, line=9)
    build.mode(False)
    build.forward(grad=False, line=12)
    (found,) = without_backward(build.record())
    assert (found.calls, found.steps, found.modules, found.in_phases) == (2, 4, ("drop", "norm"), True)


def test_a_second_look_at_each_batch_is_no_phase():
    build = ModeRecordBuilder()
    for _ in range(4):
        build.batch()
        build.forward(grad=False, line=9)
    (found,) = without_backward(build.record())
    assert not found.in_phases
