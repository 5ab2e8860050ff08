"""What used to pass without a word: an evaluation that raises, a block in which nothing trained or that is never
judged, selections that did not count, an id without its flag, a value that pytest takes for a path."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, UsageError, check_loop, observe
from tests.helpers.plugin_sessions import (  # noqa: F401  some are fixtures
    all_of_torch_is_loaded,
    builds,
    failure,
    one_file,
    the_process_is_left_as_it_was,
)


def loop():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 4), torch.randn(8, 1)), fit=fit)


def test_an_evaluate_that_raises_is_a_fault_with_the_users_traceback(run):
    source = "def evaluate():\n    return sum([]) / len([])\n\n" + builds("return loop(evaluate=evaluate)")
    result = run(source, "--trainloop-only=step_order,train_mode,evaluation_is_pure,determinism")
    result.assert_outcomes(failed=1, passed=3, skipped=1)
    said = failure(result)
    assert said[0] == "evaluate raised ZeroDivisionError: division by zero"
    assert any(line.strip() == "ZeroDivisionError: division by zero" for line in said)
    assert any(line.endswith("in evaluate") for line in said)
    result.stdout.fnmatch_lines(["FAILED test_a.py::test_it[[]evaluation_is_pure[]]*"])


def test_a_loss_that_raises_next_to_fit_is_an_error_of_its_own(run):
    source = builds("return loop(loss=lambda model, batch: 1 / 0)")
    result = run(source, "--trainloop-only=step_order,accumulation_equivalence")
    result.assert_outcomes(failed=1, passed=2)
    assert failure(result)[0] == "TrainLoop.loss raised ZeroDivisionError: division by zero"


OBSERVED = """
    def test_script(trainloop):
        with trainloop.observe() as record:
            {block}
        {after}
"""

NOTHING = (
    "nothing trained in the observed block: {} backward passes and no optimizer step were seen, and no weight changed; "
    "run the training code inside the block, in this process"
)

SILENT = {
    "empty": ("pass", "record.check()", NOTHING.format(0)),
    "a named check alone": ("pass", "record.check('finite')", NOTHING.format(0)),
    "report only": ("pass", "record.check(raises=False)", NOTHING.format(0)),
    "evaluation": ("mse(mlp(), rows())", "record.check()", NOTHING.format(0)),
    "another process": ("import subprocess; subprocess.run(['true'])", "record.check()", NOTHING.format(0)),
    "never judged": (
        "train((m := mlp()), torch.optim.SGD(m.parameters(), lr=0.1), [rows()] * 3)",
        "pass",
        "test_a.py::test_script observed a block and never judged it; call record.check() after the block",
    ),
    "judged inside": (
        "record.check()",
        "pass",
        "record.check() is called inside the block that it judges; call it after the block",
    ),
    "unknown name": (
        "pass",
        "record.check('step')",
        "there is no check named 'step'; the nearest name is 'step_order'",
    ),
    "no name": ("pass", "record.check(3)", "there is no check named 3; names of checks are needed"),
    "skip without reason": (
        "pass",
        "record.check(skip=['step_order'])",
        "record.check(): skip=['step_order']; a dict from name to reason is needed, as in skip={'step_order': 'why'}",
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_an_observed_block_that_proves_nothing_fails(run, name):
    block, after, sentence = SILENT[name]
    result = run(OBSERVED.format(block=block, after=after))
    result.assert_outcomes(failed=1, passed=1)
    said = [line for line in result.outlines if line.endswith(f"UsageError: {sentence}")]
    assert len(said) == 1 or failure(result) == [sentence]


def test_code_that_trains_plain_tensors_by_hand_is_no_empty_block():
    weight = torch.zeros(3, requires_grad=True)
    with observe() as record:
        for _ in range(3):
            (weight - 1).square().sum().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
    assert not any(result.faults for result in record.check(raises=False).results)


FAULTY = OBSERVED.format(
    block="m = mlp(); o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
    "            for _ in range(4): mse(m, rows()).backward(); o.step()",
    after="record.check({})",
)


@pytest.mark.parametrize(
    ("ini", "options", "given"),
    [
        ("trainloop_skip = step_order: is meant", [], ""),
        ("trainloop_skip = step_order:not_zeroed: is meant", [], ""),
        ("trainloop_xfail = step_order: known", [], ""),
        ("trainloop_only = finite", [], ""),
        ("", ["--trainloop-only=finite,train_mode"], ""),
        ("", [], "skip={'step_order': 'is meant'}"),
        ("", [], "xfail={'step_order:not_zeroed': 'known'}"),
        ("", [], "'finite'"),
        ("", [], "'fin*'"),
    ],
)
def test_selections_count_for_an_observed_block(pytester, run, ini, options, given):
    pytester.makeini(f"[pytest]\n{ini}")
    run(FAULTY.replace("{}", given), *options).assert_outcomes(passed=2)


def test_without_a_selection_the_observed_block_fails(run):
    run(FAULTY.replace("{}", "")).assert_outcomes(failed=1, passed=1)


def test_selections_that_leave_no_check_are_a_skip(run):
    result = run(FAULTY.replace("{}", "'step_order'"), "--trainloop-only=finite", "-rs")
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(["*no check is left: record.check(), the ini file and --trainloop-only choose diff*"])


def test_an_id_without_its_flag_names_the_flag(pytester):
    pytester.makepyfile(test_a="import pytest\n\n@pytest.mark.trainloop\ndef test_it(): ...\n\ndef test_other(): ...")
    result = pytester.runpytest("test_a.py::test_it[step_order]")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: not found: *", "ERROR: 'step_order' is a check of pytest-trainloop, whose items are there with --tra*"]
    )
    other = pytester.runpytest("test_a.py::test_other[one]")
    other.stderr.no_fnmatch_line("*pytest-trainloop*")


def test_a_value_that_pytest_takes_for_a_path_is_told(pytester, monkeypatch):
    project = pytester.mkdir("project")
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntrainloop_seed = '3'\n", "utf-8")
    (project / "test_a.py").write_text("def test_plain(): ...\n", "utf-8")
    monkeypatch.chdir(project)
    sentence = (
        "trainloop: pytest took ../r.json for a path to tests and did not read pyproject.toml; "
        "write --trainloop-json=../r.json"
    )
    first = pytester.runpytest_inprocess("--trainloop-json", "../r.json")
    first.stdout.no_fnmatch_line("*for a path to tests*")
    assert json.loads((pytester.path / "r.json").read_text("utf-8"))["environment"]["seed"] == 3
    assert sentence in pytester.runpytest_inprocess("--trainloop-json", "../r.json").outlines
    pytester.runpytest_inprocess("--trainloop-json=../r.json").stdout.no_fnmatch_line("*for a path to tests*")


@pytest.mark.processes
def test_an_interrupted_session_is_not_said_to_hold_no_loops(pytester):
    """Under xdist, whose own process holds no items. No signal is sent: a session in the background ignores it."""
    pytest.importorskip("xdist")
    pytester.makeconftest(
        """
        import pytest
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(session):
            raise KeyboardInterrupt
        """
    )
    pytester.makepyfile("import pytest\n@pytest.mark.trainloop(only=['step_order'])\ndef test_it(): ...")
    result = pytester.runpytest_inprocess("-p", "no:randomly", "--trainloop", "-n1", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["trainloop: NOTHING WAS CHECKED: the session was interrupted"])
    result.stdout.no_fnmatch_line("*carries @pytest.mark.trainloop*")


BY_HAND = {
    "a loop": (lambda: check_loop(loop()), "check_loop got a TrainLoop; the function that returns a TrainLoop is"),
    "nothing": (lambda: check_loop(None), "check_loop got None; the function that returns a TrainLoop is needed"),
    "a parameter": (
        lambda: check_loop(lambda hidden: loop()),
        "<lambda> takes 'hidden', which has no default, and check_loop calls it with knobs only; give it a default",
    ),
    "a string of checks": (lambda: check_loop(lambda: loop(), only="step_order"), "check_loop: only='step_order'"),
    "a large seed": (lambda: check_loop(lambda: loop(), seed=2**63), f"the seed is {2**63}; a whole number from"),
    "a seed of text": (lambda: check_loop(lambda: loop(), seed="0"), "the seed is '0'; a whole number from 0 to"),
    "no time": (lambda: check_loop(lambda: loop(), timeout=0), "the timeout is 0; a number of seconds above 0"),
    "a device": (
        lambda: check_loop(lambda: loop(), device="tpu"),
        "the device is 'tpu'; auto, cpu, cuda, or one of several as cuda:1, is",
    ),
    "a model's name": (lambda: observe("gpt").__enter__(), "observe(model=...) is a str; a torch.nn.Module is needed"),
    "an optimizer's class": (
        lambda: observe(optimizer=dict).__enter__(),
        "observe(optimizer=...) is the class dict; an optimizer with step() is needed",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bad_input_by_hand_is_one_sentence(name):
    call, sentence = BY_HAND[name]
    with pytest.raises(UsageError) as info:
        call()
    assert str(info.value).startswith(sentence)
    assert "\n" not in str(info.value)


def test_an_unused_knob_is_told_before_what_follows_from_it():
    report = check_loop(lambda accumulate=1: loop(), only=["accumulation_equivalence"], raises=False)
    ((found,),) = [result.faults for result in report.results]
    assert found.summary == "the loop did the same with accumulate=1 and accumulate=2: the knob does not reach it"
    assert found.repair.startswith("hand accumulate on to the loop")
