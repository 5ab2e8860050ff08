"""A training script as a test: run once, its results as items."""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_trainloop
from pytest_trainloop import Script, UsageError, check_loop
from tests.script_runner.conftest import HEAD, TRAIN

END = """
import signal
if sys.argv[1:] == ["late"]:
    raise ValueError("after training")
if sys.argv[1:] == ["killed"]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A folder with a script that does what its argument says."""
    monkeypatch.setenv("PYTHONPATH", str(Path(pytest_trainloop.__file__).parents[1]))
    source = HEAD + TRAIN.replace("epochs=20", "epochs=int('zero' not in sys.argv) * 2")
    source = source.replace("        optimizer.zero_grad()\n", "        'kept' in sys.argv or optimizer.zero_grad()\n")
    (tmp_path / "train.py").write_text(source + END, encoding="utf-8")
    return tmp_path


def judged(script, *args, only=("step_order", "determinism"), **given):
    report = check_loop(lambda: Script("train.py", args, cwd=script), only=only, raises=False, **given)
    return {result.check: result for result in report.results}


@pytest.mark.processes
def test_what_one_run_decides_is_judged_and_the_rest_says_what_it_needs(script):
    results = judged(script)
    assert results["step_order"].outcome == "passed"
    assert results["step_order"].seconds > 0.5
    assert results["determinism"].seconds == 0.0
    assert results["determinism"].outcome == "skipped"
    assert results["determinism"].reason == "a script runs once; this check needs a function that takes batches"


@pytest.mark.processes
def test_a_fault_has_its_text_and_its_line(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    fault = judged(script, "kept")["step_order"].faults[0]
    assert fault.cause == "not_zeroed"
    assert fault.change.startswith(f"{script.name}/train.py:")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("late", "the script raised ValueError: after training after 8 optimizer steps"),
        ("killed", "the script was ended by SIGKILL"),
    ],
)
def test_a_script_that_fails_is_one_error(script, argument, said):
    results = judged(script, argument)
    assert [r.outcome for r in results.values()] == ["error", "skipped"]
    assert results["step_order"].reason.startswith(said)
    assert results["determinism"].reason == f"{said} (see <lambda>[step_order])"


@pytest.mark.processes
def test_where_nothing_trains_nothing_is_judged(script):
    with pytest.raises(UsageError, match="nothing trained in this process"):
        judged(script, "zero")


@pytest.mark.processes
def test_a_script_that_takes_too_long_is_ended(script):
    results = judged(script, budget=0.05)
    assert [r.looked_at for r in results.values()] == [False, False]
    assert "did not come to 30 optimizer steps in 0.05 s" in results["step_order"].reason


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"name": "none.py"}, "Script: there is no file .*none.py"),
        ({"args": "--epochs 2"}, "Script: args is '--epochs 2'; a list of words is needed"),
        ({"args": [2]}, r"Script: args is \[2\]; a list of words"),
        ({"steps": -1}, "Script: steps is -1; a number of optimizer steps"),
        ({"cwd": "nowhere"}, "Script: cwd is 'nowhere'; a folder that exists"),
    ],
)
def test_what_is_no_command_is_refused(script, given, sentence):
    with pytest.raises(UsageError, match=sentence):
        Script(**{"name": "train.py", "cwd": script, **given})


def test_the_words_of_a_script_are_its_own(script):
    made = Script("train", ["--", "-v"], module=True, steps=3, torchrun=True)
    assert made.command("-v") == ["-v", "--steps=3", "--torchrun", "-m", "train", "--", "--", "-v"]
    assert Script("train", module=True, limit_batches=4).command()[:2] == ["--steps=30", "--limit-batches=4"]


def test_a_script_is_given_no_device(script):
    with pytest.raises(UsageError, match="does not reach a script"):
        judged(script, device="cpu")
