"""What ``input_dependence`` says of tensors that nothing depends on."""

from __future__ import annotations

from pytest_trainloop.checks.batch.input_dependence.check import input_dependence
from pytest_trainloop.checks.batch.input_dependence.passes import BatchTensor, InputRuns, UnusedInputs
from tests.helpers.records import FakeEvidence

X, MASK = BatchTensor("batch['x']", 0, passed=True), BatchTensor("batch['mask']", 1, passed=True)


class Runs:
    def __init__(self, found):
        self.found = found

    def unused(self):
        return self.found


def findings(found):
    return list(input_dependence(FakeEvidence(None, shared={InputRuns: Runs(found)})))


def test_inputs_that_are_used_pass():
    assert findings(None) == []


def test_no_input_used_is_a_fault():
    (found,) = findings(UnusedInputs((X, MASK), no_input_used=True, place="train.py:3"))
    assert (found.cause, found.level) == ("inputs_ignored", "fault")
    assert found.culprits == ("batch['x']", "batch['mask']")


def test_one_unused_input_is_advice():
    (found,) = findings(UnusedInputs((MASK,), no_input_used=False, place="train.py:3"))
    assert (found.cause, found.level) == ("input_ignored", "advice")
    assert found.summary == "the model is called with batch['mask'], and nothing depends on it"
