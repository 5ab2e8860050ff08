"""What cannot be judged is refused in one sentence."""

from __future__ import annotations

import re

import pytest

from tests.helpers.plugin_sessions import (  # noqa: F401  some are fixtures
    OTHERS,
    all_of_torch_is_loaded,
    builds,
    failure,
    fit,
    one_file,
    the_process_is_left_as_it_was,
)

REFUSED_LOSS = {
    "vector": (
        "F.mse_loss(model(batch[0]), batch[1], reduction='none')",
        "TrainLoop.loss returned a float32 tensor of shape (8, 1); a scalar is needed: take its mean",
    ),
    "float": ("1.5", "TrainLoop.loss returned 1.5; a scalar tensor with a history is needed"),
    "none": ("None", "TrainLoop.loss returned None; a scalar tensor with a history is needed"),
}


@pytest.mark.parametrize(("value", "sentence"), REFUSED_LOSS.values(), ids=list(REFUSED_LOSS))
def test_a_loss_alone_must_give_a_scalar(run, value, sentence):
    result = run(builds(f"return loop(fit=None, loss=lambda model, batch: {value})"))
    result.assert_outcomes(failed=1, passed=1, skipped=OTHERS)
    (said,) = failure(result)
    assert re.fullmatch(re.escape(sentence) + r" \(test_a\.py:\d+\)", said)


BACKWARD = """
    for batch in batches:
        optimizer.zero_grad()
        {}.backward()
        optimizer.step()
"""

NAMED = {
    "no-history": (
        fit(BACKWARD.format("mse(model, batch).detach()")),
        "gradient_reaches_every_param",
        "0.weight, 0.bias* get no gradient although the loss depends on them: the graph is cut by "
        "detach(), and torch refuses *",
    ),
    "float": (
        fit(BACKWARD.format("mse(model, batch).item()")),
        "gradient_reaches_every_param",
        "0.weight, 0.bias* get no gradient: the graph is cut by item(), and torch refuses *",
    ),
    "loss-without-history": (
        builds("return loop(fit=None, loss=lambda model, batch: mse(model, batch).detach())"),
        "gradient_reaches_every_param",
        "0.weight, 0.bias* get no gradient although the loss depends on them: the graph is cut by "
        "detach(), and torch refuses *",
    ),
    "optimizer-of-another-model": (
        builds("return loop(optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1))"),
        "optimizer_holds_every_param",
        "the optimizer holds none of the 4 parameters that train: it was built on another copy of the model",
    ),
}


@pytest.mark.parametrize(("source", "check", "summary"), NAMED.values(), ids=list(NAMED))
def test_a_fault_is_named_by_the_check_it_belongs_to(run, source, check, summary):
    result = run(source, f"--trainloop-only={check}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines([f"FAILED test_a.py::test_it[[]{check}[]] *"])
    said = failure(result)
    pytest.LineMatcher(said[:1]).fnmatch_lines([summary])
    assert said[-1] == f"more       pytest --trainloop-explain {check}"
    result.stdout.no_fnmatch_line("Traceback*")


COLLECTED = {
    "test-case": (
        "import unittest\nclass TestOld(unittest.TestCase):\n    @pytest.mark.trainloop\n    def test_it(self): ...",
        "test_b.py: the trainloop marker is on TestOld.test_it of a unittest.TestCase; it needs a function, or a "
        "method of a plain class",
    ),
    "coroutine": (
        "@pytest.mark.trainloop\nasync def test_it(): ...",
        "test_b.py::test_it is marked trainloop and is a coroutine function; a plain function is needed that returns a "
        "TrainLoop",
    ),
    "given": (
        "from hypothesis import given, strategies as st\n"
        "@pytest.mark.trainloop\n@given(st.integers())\ndef test_it(n): ...",
        "test_b.py::test_it is marked trainloop and is wrapped in hypothesis.given; a plain function is needed that "
        "returns a TrainLoop",
    ),
    "knob-parametrized": (
        "@pytest.mark.trainloop\n@pytest.mark.parametrize('accumulate', [1, 2])\ndef test_it(accumulate=1): ...",
        "test_b.py::test_it: parametrize gives values to 'accumulate', the loop's knob 'accumulate', which the checks "
        "vary; take 'accumulate' out of parametrize, or drop its default to have a plain parameter",
    ),
}


@pytest.mark.parametrize(("source", "sentence"), COLLECTED.values(), ids=list(COLLECTED))
def test_refused_at_collection(pytester, run, source, sentence):
    pytester.makepyfile(test_b=f"import pytest\n{source}")
    result = run("")
    result.assert_outcomes(failed=1, passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert failure(result) == [sentence]
