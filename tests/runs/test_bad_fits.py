"""Nothing that a loop does takes the session with it, and what it raises is shown as the user's own."""

from __future__ import annotations

import re
import textwrap

import pytest
import torch
from torch import nn

from pytest_trainloop.runs import guard
from tests.helpers.plugin_sessions import (  # noqa: F401  some are fixtures
    FIRST,
    HEAD,
    OTHERS,
    TAIL,
    all_of_torch_is_loaded,
    builds,
    failure,
    fit,
    one_file,
    the_process_is_left_as_it_was,
)

REFUSED = {
    "fit-exits-0": (fit("sys.exit(0)"), "fit called sys.exit(0) after 0 steps; return from fit instead"),
    "fit-exits-3-at-the-end": (
        fit("train(model, optimizer, batches)\nsys.exit(3)"),
        "fit called sys.exit(3) after 12 steps; return from fit instead",
    ),
    "fit-exits": (fit("sys.exit()"), "fit called sys.exit() after 0 steps; return from fit instead"),
    "fit-exits-with-a-text": (
        fit("sys.exit('no data')"),
        "fit called sys.exit('no data') after 0 steps; return from fit instead",
    ),
    "fit-exits-hard": (fit("os._exit(1)"), "fit called os._exit(1) after 0 steps; return from fit instead"),
}


@pytest.mark.parametrize(("source", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_refused_in_one_sentence(run, source, sentence):
    result = run(source)
    result.assert_outcomes(failed=1, passed=1, skipped=OTHERS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (said,) = failure(result)
    assert re.fullmatch(re.escape(sentence) + r" \(test_a\.py:\d+\)", said)


@pytest.mark.parametrize(
    "body",
    ["while True:\n    pass", "while True:\n    try:\n        sum(range(1000))\n    except:\n        pass"],
    ids=["spins", "spins-and-swallows"],
)
def test_a_fit_that_never_ends(run, monkeypatch, body):
    monkeypatch.setattr(guard, "GRACE", 0.2)
    result = run(fit(body), "--trainloop-timeout=0.2", "--trainloop-only=step_order")
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(
        ["*NOTHING WAS CHECKED*", "*time ran out after 0 steps: give --trainloop-timeout=0.4 *"]
    )


def test_a_fit_that_ignores_the_end_of_its_batches(run, monkeypatch):
    monkeypatch.setattr(guard, "GRACE", 0.2)
    forever = fit("train(model, optimizer, batches)\nwhile True:\n    pass")
    result = run(forever, "--trainloop-timeout=2", "--trainloop-only=step_order")
    result.assert_outcomes(failed=1, passed=1)
    (said,) = failure(result)
    assert said.startswith(
        "fit got the end of its batches after 12 steps and did not come back in more than 2 s; it must end when they "
        "do (--trainloop-timeout=SECONDS allows more)"
    )


RAISED = {
    "building-raises": (
        "def read():\n    raise OSError('no data here')\n\n" + builds("read()\nreturn loop()"),
        "building the loop raised OSError: no data here",
        ["in test_it", "read()", "in read", "raise OSError('no data here')", "OSError: no data here"],
    ),
    "building-exits": (
        builds("sys.exit(2)"),
        "building the loop raised SystemExit: 2",
        ["in test_it", "sys.exit(2)", "SystemExit: 2"],
    ),
    "building-works-once": (
        "PORTS = iter([8000])\n\n" + builds("port = next(PORTS)\nreturn loop()"),
        "building the loop* raised StopIteration",
        ["in test_it", "port = next(PORTS)", "StopIteration"],
    ),
    "building-binds-a-port": (
        "TAKEN = []\n\n" + builds("if TAKEN:\n    raise OSError('address in use')\nTAKEN.append(1)\nreturn loop()"),
        "building the loop* raised OSError: address in use",
        ["in test_it", "raise OSError('address in use')", "OSError: address in use"],
    ),
    "raises-at-step-3": (
        fit("""
            for step, batch in enumerate(batches):
                if step == 3:
                    raise ValueError("bad row")
                train(model, optimizer, [batch])
        """),
        "fit raised ValueError: bad row",
        ["in work", 'raise ValueError("bad row")', "ValueError: bad row"],
    ),
    "raises-from-another": (
        fit("""
            try:
                {}["lr"]
            except KeyError as error:
                raise ValueError("no rate") from error
        """),
        "fit raised ValueError: no rate",
        ["KeyError: 'lr'", "The above exception was the direct cause*", 'raise ValueError("no rate") from error'],
    ),
    "batches-raise": (
        "def read():\n    yield rows()\n    raise OSError('disk')\n\n"
        + builds("return loop(batch=None, batches=read())"),
        "fit raised OSError: disk",
        ["in train", "for batch in batches:", "in read", "raise OSError('disk')", "OSError: disk"],
    ),
    "batch-on-another-device": (
        fit("train(model, optimizer, ((x.to('meta'), y) for x, y in batches))"),
        "fit raised RuntimeError: Tensor on device cpu is not on the expected device meta!",
        ["in work", "in train", "mse(model, batch).backward()", "RuntimeError: Tensor on device cpu*"],
    ),
    "fit-takes-epochs": (
        fit("for epoch in range(batches):\n    pass"),
        "fit raised TypeError: 'Batches' object cannot be interpreted as an integer; fit is called with the batches as "
        "its only argument",
        ["in work", "for epoch in range(batches):", "TypeError: *"],
    ),
    "vector-backpropagated": (
        fit("""
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y, reduction="none").backward()
                optimizer.step()
        """),
        "fit raised RuntimeError: grad can be implicitly created only for scalar outputs; this one has shape (8, 1): "
        "take its mean",
        ["in work", '*reduction="none").backward()', "RuntimeError: grad can be *"],
    ),
}


@pytest.mark.parametrize(("source", "sentence", "traceback"), RAISED.values(), ids=list(RAISED))
def test_the_users_own_traceback_once(run, source, sentence, traceback):
    result = run(source)
    result.assert_outcomes(failed=1, passed=1, skipped=OTHERS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    said = pytest.LineMatcher(failure(result))
    said.fnmatch_lines([sentence.replace("[", "[[]"), *(f"*{line}" for line in traceback)])
    result.stdout.fnmatch_lines([f"  skipped  *: * (see {FIRST})"])


RIGHT = {
    "epochs-without-end": fit("while True:\n    train(model, optimizer, batches)"),
    "a-batch-kept-for-ever": fit("batch = batches[0]\nwhile True:\n    train(model, optimizer, [batch])"),
    "two-passes-statistics-first": fit("""
        mean = sum(x.mean() for x, _ in batches) / len(batches)
        train(model, optimizer, ((x - mean, y) for x, y in batches))
    """),
    "swallows-exceptions": fit("""
        for batch in batches:
            try:
                train(model, optimizer, [batch])
            except Exception:
                pass
    """),
    "swallows-everything-for-ever": fit("""
        while True:
            try:
                train(model, optimizer, batches)
            except:
                pass
    """),
    "swallows-everything-over-one-batch": fit("""
        batch = batches[0]
        while True:
            try:
                train(model, optimizer, [batch])
            except BaseException:
                continue
    """),
    "stop-iteration-at-the-end": fit("""
        stream = iter(batches)
        while True:
            train(model, optimizer, [next(stream)])
    """),
    "mean-over-an-empty-second-epoch": fit("""
        for epoch in range(2):
            losses = []
            for batch in batches:
                train(model, optimizer, [batch])
                losses.append(1.0)
            print(sum(losses) / len(losses))
    """),
    "forks": fit("""
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
        train(model, optimizer, batches)
    """),
    "forks-and-the-child-fails": fit("""
        child = os.fork()
        if not child:
            raise ValueError("in the child")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        train(model, optimizer, batches)
    """),
    "forks-and-the-child-exits": fit("""
        leaves = [lambda: sys.exit(5), lambda: os._exit(6), sys.exit, lambda: sys.exit("no data")]
        statuses = []
        for leave in leaves:
            child = os.fork()
            if not child:
                leave()
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert statuses == [5, 6, 0, 1]
        train(model, optimizer, batches)
    """),
}


FEW = "step_order,update_ratio,batch_independence,memory_growth"
"""Checks with runs of each kind: the watched one, a long one, with other batches, and until memory is judged."""

every_right_fit = pytest.mark.parametrize("source", RIGHT.values(), ids=list(RIGHT))


@every_right_fit
def test_nothing_is_held_against_an_odd_but_right_loop(run, source):
    held_against_nothing(run(source, f"--trainloop-only={FEW}"))


@pytest.mark.corpus
@every_right_fit
def test_no_check_holds_anything_against_an_odd_but_right_loop(run, source):
    held_against_nothing(run(source))


def held_against_nothing(result):
    assert set(result.parseoutcomes()) <= {"passed", "skipped", "warnings"}
    assert result.ret == 0


def test_a_loop_that_swallows_its_own_mistake_is_not_passed(run):
    held = [  # whatever else is alive in the process, and can't be read or compared
        nn.LazyLinear(2),
        torch.eye(2).to_sparse().requires_grad_(),
        torch.ones(2, device="meta", requires_grad=True),
    ]
    result = run(
        fit("""
            for x, y in batches:
                try:
                    train(model, optimizer, [(x[:, :3], y)])
                except Exception:
                    pass
        """),
        "--trainloop-only=step_order,gradient_reaches_every_param",
    )
    result.assert_outcomes(passed=1, skipped=1, failed=1)
    assert failure(result)[0] == (
        "fit trains nothing: no backward pass and no optimizer step in 400 batches; it swallows RuntimeError: "
        "mat1 and mat2 shapes cannot be multiplied (8x3 and 4x8)"
    )
    assert held


def test_an_interrupt_ends_the_session_as_ever(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    source = HEAD + textwrap.indent(fit("raise KeyboardInterrupt"), "    ") + TAIL
    pytester.makepyfile(test_a=textwrap.dedent(source))
    result = pytester.inline_run("-p", "no:randomly", "--trainloop", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not (pytester.path / "went_on").exists()


@pytest.mark.parametrize("body", ["pytest.skip('no data')", "return loop(lambda *_: pytest.skip('no data'))"])
def test_a_skip_of_the_users_own_is_one(run, body):
    result = run(builds(body))
    result.assert_outcomes(skipped=OTHERS + 1, passed=1)
    result.stdout.fnmatch_lines(["  skipped  *: no data"])
