"""What the command says of a script, and its exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import pytest

from tests.script_runner.conftest import HEAD, TRAIN


def test_a_correct_script_is_stopped_and_passes(watch):
    said = watch(TRAIN, "--steps=14")
    assert said.status == 0
    assert "train.py: 14 optimizer steps watched, then it was stopped (--steps=N for more)" in said.out
    assert "train.py  " in said.out
    assert "passed" in said.out
    assert "failed" not in said.out


def test_a_script_that_ends_earlier_runs_to_its_end(watch):
    said = watch(TRAIN.replace("epochs=20", "epochs=1") + "print('its own last line')\n")
    assert said.status == 0
    assert "train.py: 4 optimizer steps watched, to its own end" in said.out
    assert said.out.index("its own last line") < said.out.index("optimizer steps watched")


def test_with_0_it_runs_to_its_own_end(watch):
    assert "80 optimizer steps watched, to its own end" in watch(TRAIN, "--steps=0").out


EPOCHS = """
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = loader(800)
    print(len(data), "batches")
    for epoch in range(4):
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print(sum(F.mse_loss(model(x), y).item() for x, y in data))
"""


@pytest.mark.parametrize("repaired", [False, True])
def test_epochs_end_early_if_asked(watch, repaired):
    source = EPOCHS + "        model.train()\n" * repaired
    said = watch(source)
    assert (said.status, "100 batches" in said.out) == (0, True)
    assert "no epoch came to its end: --limit-batches=8 ends each pass over a DataLoader after 8 batches" in said.out
    said = watch(source, "--limit-batches=4", "--steps=0")
    assert "16 optimizer steps watched, to its own end" in said.out
    assert said.out.startswith("4 batches")
    assert (said.status, "[eval_left_on]" in said.out) == ((0, False) if repaired else (1, True))


def test_a_limit_of_batches_that_limits_nothing(watch):
    said = watch(
        """
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            train(model, optimizer, [rows()])
    """,
        "--limit-batches=4",
    )
    assert "no DataLoader was iterated, so --limit-batches changed nothing" in said.out


FAULTY = """
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    while True:
        train(model, optimizer, loader())
"""


def test_a_fault_is_told_as_pytest_tells_it(watch):
    said = watch(FAULTY)
    assert said.status == 1
    assert re.search(r"change     train.py:\d+   optimizer = torch.optim.SGD\(model\[0\].parameters", said.out)
    assert "optimizer_holds_every_param: " in said.out
    assert "1 failed" in said.out


def test_checks_are_chosen_as_in_pytest(watch):
    assert watch(FAULTY, "--trainloop-only=step_order,train_*").status == 0
    said = watch(FAULTY, "--trainloop-skip=optimizer_holds_every_param: it is frozen")
    assert said.status == 0
    assert watch(FAULTY, "--trainloop-skip", "optimizer_holds_every_param:* : it is frozen").status == 0


def test_advice_fails_if_asked(watch):
    script = TRAIN.replace("    data = ", "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n    data = ")
    script = script.replace("epochs=20", "epochs=2")
    assert watch(script).status == 0
    assert watch(script, "--trainloop-strict").status == 1


def test_the_results_are_written_as_json(watch, folder):
    said = watch(FAULTY, "--trainloop-json", "deep/report.json")
    assert said.status == 1
    (loop,) = json.loads((folder / "deep/report.json").read_text())["loops"]
    assert loop["nodeid"] == "train.py"
    assert loop["steps"] == 30
    assert {c["check"] for c in loop["checks"] if c["outcome"] == "failed"} == {"optimizer_holds_every_param"}
    assert list((folder / "deep").iterdir()) == [folder / "deep/report.json"]


def test_what_could_not_be_decided_is_named_if_asked(watch):
    quiet, full = watch(TRAIN), watch(TRAIN, "-v")
    assert "overfit_one_batch" not in quiet.out
    assert "--write-test=FILE writes the test that hands it over" in quiet.out
    assert "overfit_one_batch" in full.out


def test_a_stopped_script_is_not_blamed_for_what_comes_at_the_end_of_its_epoch(watch):
    said = watch("""
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for epoch in range(3):
            train(model, optimizer, loader(800))
            scheduler.step()
    """)
    assert said.status == 0
    assert "StepLR" not in said.out


def test_weights_that_are_changed_by_hand(watch):
    said = watch("""
        model = mlp()
        while True:
            x, y = rows()
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)
    """)
    assert said.status == 0
    assert "257 backward passes and no optimizer's step watched, then it was stopped" in said.out


NOTHING = {
    "no training": ("print('hello')", "no backward pass and no step was seen"),
    "only gradients": ("mlp()(rows()[0]).sum().backward()", "1 backward passes and no optimizer step were seen"),
    "sys.exit": ("sys.exit(0)", "no backward pass and no step was seen"),
}


@pytest.mark.parametrize(("source", "why"), NOTHING.values(), ids=NOTHING)
def test_where_nothing_trained_one_sentence_says_so(watch, source, why):
    said = watch(source)
    assert said.status == 2
    assert said.err == f"pytest_trainloop: train.py: nothing trained in this process, so nothing is judged: {why}\n"
    assert "trainloop =" not in said.out


OWN_FAILURES = {
    "raised": ("raise ValueError('no data')", "the script raised ValueError: no data after 4 optimizer steps", 1),
    "exit": ("sys.exit(3)", "the script ended itself by sys.exit(3) after 4 optimizer steps", 1),
    "exit_text": ("sys.exit('bad')", "the script ended itself by sys.exit('bad') after 4 optimizer steps", 1),
    "hard": ("os._exit(4)", "the script ended itself by os._exit(4) after 4 optimizer steps", 1),
    "interrupted": ("raise KeyboardInterrupt", "interrupted after 4 optimizer steps", 1),
    "fine": ("sys.exit()", "", 0),
    "hard_fine": ("os._exit(0)", "", 0),
}


@pytest.mark.parametrize(("source", "sentence", "status"), OWN_FAILURES.values(), ids=OWN_FAILURES)
def test_the_failure_of_the_script_is_told_as_its_own(watch, source, sentence, status):
    said = watch(TRAIN.replace("epochs=20", "epochs=1") + source)
    assert said.status == status
    assert "passed" in said.out
    if sentence:
        assert f"train.py: {sentence}" in said.out
        assert "4 optimizer steps watched, then it failed" in said.out
    assert "pytest_trainloop/" not in said.out


def test_a_script_that_fails_before_it_trains(watch):
    said = watch("import no_such_module")
    assert said.status == 1
    assert "the script raised ModuleNotFoundError: No module named 'no_such_module' before any step" in said.out
    assert 'train.py", line 23, in <module>' in said.out
    assert not said.err


def test_a_syntax_error_is_shown_as_python_shows_it(watch):
    said = watch("def f(:\n", head="")
    assert said.status == 1
    assert "train.py" in said.err
    assert "SyntaxError" in said.err
    assert "pytest_trainloop" not in said.err


SWALLOWS = """
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        try:
            train(model, optimizer, loader())
        except {}:
            continue
"""


def test_except_exception_lets_the_stop_pass(watch):
    said = watch(SWALLOWS.format("Exception"))
    assert said.status == 0
    assert "30 optimizer steps watched, then it was stopped" in said.out


@pytest.mark.processes
def test_a_script_that_swallows_every_exception_is_ended_where_it_is(folder):
    (folder / "train.py").write_text(HEAD + textwrap.dedent(SWALLOWS.format("BaseException")))
    command = [sys.executable, "-m", "pytest_trainloop", "train.py"]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "30 optimizer steps watched, then it was stopped" in done.stdout
    assert "it swallowed the exception that ends it, and was ended where it was" in done.stdout


def test_what_follows_the_stop_is_not_recorded(watch):
    said = watch("""
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            while True:
                train(model, optimizer, loader())
        finally:
            (model(rows()[0]).sum() * float("nan")).backward()
    """)
    assert said.status == 0


def test_files_that_it_writes_are_listed(watch, folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere") / "log.txt"
    (folder / "read.txt").write_text("old")
    said = watch(TRAIN, args=(str(other),))
    assert "files the script wrote" not in said.out
    said = watch(
        TRAIN.replace(
            "    main()",
            """
    open("read.txt").read()
    open("gone.txt", "w").close()
    os.remove("gone.txt")
    os.makedirs("runs")
    torch.save(mlp().state_dict(), "runs/model.pt")
    open(sys.argv[1], "w").close()
    main()
""",
        ),
        args=(str(other),),
    )
    assert f"files the script wrote: runs/model.pt, {other}\n" in said.out


REFUSED = {
    "nothing": ((), "no script was given"),
    "option": (("--stepz=3", "train.py"), "unrecognized arguments: --stepz=3 (python -m pytest_trainloop --help)"),
    "number": (("--steps=many", "train.py"), "argument --steps: invalid int value: 'many'"),
    "negative": (("--steps=-1", "train.py"), "--steps is -1; a number of optimizer steps is needed, or 0 for no limit"),
    "limit": (("--limit-batches=-1", "train.py"), "--limit-batches is -1; a number of batches is needed, or 0 for no"),
    "missing": (("no.py",), "no.py cannot be run: No such file or directory; the path of a Python script is needed"),
    "module": (("-m", "no_such.thing"), "-m no_such.thing cannot be run: "),
    "check": (("--trainloop-only=step_ordr", "train.py"), "matches no check; the nearest name is 'step_order'"),
    "skip": (("--trainloop-skip=step_order", "train.py"), "'name: why' is needed"),
    "exists": (("--write-test=train.py", "train.py"), "this file exists, and is not overwritten; name another"),
    "suffix": (("--write-test=test", "train.py"), "a file name that ends in .py is needed"),
    "folder": ((".",), ". is a folder, and has no __main__.py; give the script in it, or start from the folder"),
    "no folder": (("--write-test=no/test.py", "train.py"), "--write-test=no/test.py: there is no folder no; make it"),
}


@pytest.mark.parametrize(("given", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(watch, folder, capsys, given, sentence):
    from pytest_trainloop.frontends.script_runner.command import command

    (folder / "train.py").write_text("raise SystemExit('it must not run')")
    assert command(given) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.startswith("pytest_trainloop: ")
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_of_several_processes_of_torchrun_one_reports(watch, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert watch(TRAIN).out == ""
    assert watch(FAULTY).status == 1
    monkeypatch.setenv("RANK", "0")
    assert "optimizer steps watched" in watch(TRAIN).out


@pytest.fixture
def broken(monkeypatch):
    """A check of this package that raises."""
    from dataclasses import replace

    from pytest_trainloop.core import registry

    def decide(evidence):
        raise IndexError("list index out of range")
        yield

    known = registry.of("loop")
    worse = replace(known["step_order"], decide=decide)
    monkeypatch.setattr(registry, "of", lambda subject: {**known, "step_order": worse})


@pytest.mark.parametrize("filters", ["", "import warnings; warnings.simplefilter('error')\n"], ids=["", "as errors"])
def test_a_check_that_breaks_is_told_of_and_the_others_judge(watch, broken, filters):
    said = watch(filters + FAULTY.replace("\n    ", "\n"))
    assert said.status == 1
    assert "optimizer_holds_every_param: " in said.out
    assert "error  step_order: was stopped by a mistake in pytest-trainloop, not in your code: IndexError" in said.out
    assert "Traceback" not in said.out + said.err


def test_where_no_chosen_check_can_decide_nothing_is_judged(watch, folder):
    said = watch(TRAIN, "--trainloop-only=overfit_one_batch", "--trainloop-json=report.json")
    assert said.status == 2
    assert "NOTHING WAS CHECKED, 1 skipped" in said.out
    assert said.err == (
        "pytest_trainloop: train.py: nothing was judged: all checks were skipped: 1 x this takes further runs of the "
        "loop: --write-test=FILE writes the test that can\n"
    )
    assert "  the skipped check runs a loop again" in said.out
    assert (folder / "report.json").is_file()


def test_the_count_of_what_a_test_would_decide_is_the_count_of_the_skipped(watch):
    said = watch(TRAIN, "-v")
    skipped, rest = (int(n) for n in re.findall(r"(\d+) skipped", said.out))
    assert skipped == rest
    for words in ("marked test", "has no knob", "0.0 s"):
        assert words not in said.out
    assert "accumulation_equivalence: this takes a run with another accumulate: --write-test=FILE" in said.out
