"""What cannot be judged is refused in one sentence, and nothing that a loop does takes the session with it."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop, check_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = """
    import os, sys, pytest, torch
    from pathlib import Path
    import torch.nn.functional as F
    from torch import nn
    from pytest_trainloop import TrainLoop

    def mlp():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def rows(n=8):
        return torch.randn(n, 4), torch.randn(n, 1)

    def mse(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def train(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()

    def loop(fit=train, **given):
        model = given.pop("model", None) or mlp()
        optimizer = given.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
        given.setdefault("batch", rows())
        if fit is not None:
            given["fit"] = lambda batches: fit(model, optimizer, batches)
        return TrainLoop(model=model, optimizer=optimizer, **given)
"""

TAIL = """
    def test_the_session_goes_on():
        with Path(__file__).with_name("went_on").open("a") as file:
            print(os.getpid(), file=file)
"""

FIRST = "test_a.py::test_it[[]optimizer_holds_every_param[]]"


def builds(body: str) -> str:
    """A marked function with this body."""
    return f"@pytest.mark.trainloop\ndef test_it():\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"


def fit(body: str) -> str:
    """A loop that trains as ``body`` says, with model, optimizer and batches at hand."""
    work = f"def work(model, optimizer, batches):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"
    return f"{work}\n{builds('return loop(work)')}"


@pytest.fixture(scope="module", autouse=True)
def all_of_torch_is_loaded() -> None:
    """An in-process run drops what it was the first to import, and torch loads parts of itself late."""

    def make():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch, loss = torch.ones(2, 2), lambda model, batch: model(batch).detach().mean() + model.bias.square().sum()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, loss=loss)

    assert not check_loop(make, raises=False).ok


@pytest.fixture(autouse=True)
def the_process_is_left_as_it_was() -> Iterator[None]:
    before = _process()
    yield
    assert _process() == before


def _process() -> list[object]:
    grad = torch.is_grad_enabled()
    return [os._exit, os.getpid(), sys.gettrace(), signal.getsignal(signal.SIGALRM), torch.get_default_dtype(), grad]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Run a session over one test file: the loop, then a plain test that tells whether the session went on."""
    for name in ("CI", "BUILD_NUMBER", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def session(source: str, *args: str) -> pytest.RunResult:
        parts = (textwrap.dedent(part) for part in (HEAD, source, TAIL))
        pytester.makepyfile(test_a="\n\n".join(parts))
        result = pytester.runpytest("-p", "no:randomly", "--trainloop", *args)
        went_on = (pytester.path / "went_on").read_text(encoding="utf-8").split()
        assert went_on == [str(os.getpid())], "the session goes on after the loop, once and in this process"
        shown = result.stdout.str() + result.stderr.str()
        assert "pytest_trainloop/" not in shown.replace("\\", "/"), "no frame of ours is shown"
        assert "INTERNALERROR" not in shown
        return result

    return session


def failure(result: pytest.RunResult) -> list[str]:
    """What stands under the header of the only failure."""
    starts = [i for i, line in enumerate(result.outlines) if line.startswith("____")]
    assert len(starts) == 1, "reported once"
    end = next(i for i, line in enumerate(result.outlines) if i > starts[0] and line.startswith("===="))
    return [line for line in result.outlines[starts[0] + 1 : end] if line]


REFUSED = {
    "returns-none": (builds("loop()"), "test_it returned None; it must return a TrainLoop"),
    "returns-tuple": (builds("return mlp(), 1"), "test_it returned a tuple of 2; it must return a TrainLoop"),
    "returns-model": (builds("return mlp()"), "test_it returned a model (Sequential); it must return a TrainLoop"),
    "returns-class": (builds("return TrainLoop"), "test_it returned the class TrainLoop; it must return a TrainLoop"),
    "model-without-parameters": (
        builds("return TrainLoop(model=nn.Tanh(), batch=rows(), fit=print)"),
        "TrainLoop.model (Tanh) has no parameters; a model that can be trained is needed",
    ),
    "model-none": (
        builds("return TrainLoop(model=None, batch=rows(), fit=print)"),
        "TrainLoop.model is None; a torch.nn.Module is needed, or a list or dict of modules",
    ),
    "model-class": (
        builds("return TrainLoop(model=nn.Linear, batch=rows(), fit=print)"),
        "TrainLoop.model is the class Linear; a torch.nn.Module is needed, or a list or dict of modules",
    ),
    "model-list-with-a-number": (
        builds("return TrainLoop(model=[mlp(), 3], batch=rows(), fit=print)"),
        "TrainLoop.model[1] is an int; a torch.nn.Module is needed",
    ),
    "model-empty-list": (
        builds("return TrainLoop(model=[], batch=rows(), fit=print)"),
        "TrainLoop.model is empty; at least one torch.nn.Module is needed",
    ),
    "batch-without-rows": (
        builds("return loop(batch=rows(0))"),
        "TrainLoop.batch is empty: a tuple with tensors of shapes (0, 4), (0, 1); at least one row is needed",
    ),
    "batch-string": (
        builds("return loop(batch='data.csv')"),
        "TrainLoop.batch is the string 'data.csv'; a batch with at least one tensor is needed",
    ),
    "batch-function": (
        builds("return loop(batch=rows)"),
        "TrainLoop.batch is the function rows; a batch with at least one tensor is needed",
    ),
    "batch-empty-dict": (
        builds("return loop(batch={})"),
        "TrainLoop.batch is a dict without tensors; a batch with at least one tensor is needed",
    ),
    "batch-none": (
        builds("return loop(batch=None)"),
        "TrainLoop got neither batch nor batches; an example batch is needed",
    ),
    "batch-on-meta": (
        builds("return loop(batch=tuple(t.to('meta') for t in rows()))"),
        "TrainLoop.batch holds a tensor on the meta device, which has no values; a batch with data is needed",
    ),
    "batch-with-a-history": (
        builds("x, y = rows()\nreturn loop(batch=(x, mlp()(x)))"),
        "TrainLoop.batch holds a tensor with a history; detach it: a batch is data, not a result of the model",
    ),
    "batch-with-an-open-file": (
        builds("return loop(batch=(*rows(), open(__file__)))"),
        "TrainLoop.batch cannot be copied (TypeError: cannot pickle '_io.TextIOWrapper' object); a batch of plain data "
        "is needed, since every run gets a fresh copy",
    ),
    "batches-empty": (
        builds("return loop(batch=None, batches=[])"),
        "TrainLoop.batches gave no batch; at least one is needed",
    ),
    "batches-number": (
        builds("return loop(batches=5)"),
        "TrainLoop.batches is 5; a DataLoader, an iterable, or a function batches(n) is needed",
    ),
    "batches-string": (
        builds("return loop(batches='data.csv')"),
        "TrainLoop.batches is the string 'data.csv'; a DataLoader, an iterable, or a function batches(n) is needed",
    ),
    "batches-one-batch": (
        builds("return loop(batches=dict(x=rows()[0]))"),
        "TrainLoop.batches is a dict with tensors of shapes (8, 4); a DataLoader, an iterable, or a function "
        "batches(n) is needed",
    ),
    "batches-of-strings": (
        builds("return loop(batches=['a', 'b'])"),
        "TrainLoop.batches[0] is the string 'a'; a batch with at least one tensor is needed",
    ),
    "batches-one-without-rows": (
        builds("return loop(batches=[rows(), rows(0)])"),
        "TrainLoop.batches[1] is empty: a tuple with tensors of shapes (0, 4), (0, 1); at least one row is needed",
    ),
    "batches-function-that-gives-nothing": (
        builds("return loop(batches=lambda n: None)"),
        "TrainLoop.batches(13) gave None; a DataLoader, an iterable, or a function batches(n) is needed",
    ),
    "optimizer-generator": (
        builds("return loop(optimizer=mlp().parameters())"),
        "TrainLoop.optimizer is a generator; an optimizer with step() is needed, or a list of them",
    ),
    "optimizer-number-in-a-list": (
        builds("return loop(optimizer=[0.1])"),
        "TrainLoop.optimizer is a float; an optimizer with step() is needed, or a list of them",
    ),
    "fit-number": (builds("return TrainLoop(model=mlp(), fit=3)"), "TrainLoop.fit is an int; a function is needed"),
    "fit-called": (
        builds("model = mlp()\nreturn TrainLoop(model=model, batch=rows(), fit=train(model, None, []))"),
        "TrainLoop got neither fit nor step nor loss; give the project's own loop: fit=lambda batches: "
        "train(model, batches)",
    ),
    "fit-and-step": (
        builds("return TrainLoop(model=mlp(), batch=rows(), fit=print, step=print)"),
        "TrainLoop got both fit and step; give the whole loop as fit, or one batch's work as step",
    ),
    "loss-string": (
        builds("return loop(loss='mse')"),
        "TrainLoop.loss is a str; a function is needed",
    ),
    "frozen-matches-nothing": (
        builds("return loop(frozen=('backbone.',))"),
        "TrainLoop.frozen: no parameter's name starts with 'backbone.'; the first names are "
        "0.weight, 0.bias, 2.weight, 2.bias",
    ),
    "frozen-string": (
        builds("return loop(frozen='0.')"),
        "TrainLoop.frozen is the string '0.'; a tuple of prefixes is needed: ('0.',)",
    ),
    "frozen-number": (
        builds("return loop(frozen=(0,))"),
        "TrainLoop.frozen names an int; prefixes of parameter names are needed, as in ('backbone.',)",
    ),
    "model-from-outside": (
        "MODEL = mlp()\nWEIGHTS = [p.detach().clone() for p in MODEL.parameters()]\n\n"
        + builds("return loop(model=MODEL)")
        + "\ndef teardown_module():\n    assert all(map(torch.equal, WEIGHTS, MODEL.parameters()))",
        "two calls of the function share the parameter 0.weight; build the model and the optimizer inside the "
        "function, so that every call gives a fresh loop (a model from a fixture or a module-level variable would be "
        "trained by every check)",
    ),
    "model-from-a-fixture": (
        "@pytest.fixture(scope='module')\ndef model():\n    model = mlp()\n"
        "    weights = [p.detach().clone() for p in model.parameters()]\n    yield model\n"
        "    assert all(map(torch.equal, weights, model.parameters()))\n\n"
        "@pytest.mark.trainloop\ndef test_it(model):\n    return loop(model=model)",
        "two calls of the function share the parameter 0.weight; build the model and the optimizer inside the "
        "function, so that every call gives a fresh loop (a model from a fixture or a module-level variable would be "
        "trained by every check)",
    ),
    "optimizer-from-outside": (
        "OPTIMIZER = torch.optim.SGD(mlp().parameters(), lr=0.1)\n\n" + builds("return loop(optimizer=OPTIMIZER)"),
        "two calls of the function share the optimizer SGD; build the model and the optimizer inside the function, so "
        "that every call gives a fresh loop (a model from a fixture or a module-level variable would be trained by "
        "every check)",
    ),
    "fit-takes-no-batch": (
        fit("return None"),
        "fit came back without taking a batch; it must iterate over the batches it is given",
    ),
    "fit-exits-0": (fit("sys.exit(0)"), "fit called sys.exit(0) after 0 steps; return from fit instead"),
    "fit-exits-3-at-the-end": (
        fit("train(model, optimizer, batches)\nsys.exit(3)"),
        "fit called sys.exit(3) after 12 steps; return from fit instead",
    ),
    "fit-exits-hard": (fit("os._exit(1)"), "fit called os._exit(1) after 0 steps; return from fit instead"),
}


@pytest.mark.parametrize(("source", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_refused_in_one_sentence(run, source, sentence):
    result = run(source)
    result.assert_outcomes(failed=1, passed=1, skipped=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert failure(result) == [sentence]
    result.stdout.fnmatch_lines([f"  skipped  * (see {FIRST}): gradient_reaches_every_param, step_order"])


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
    result.assert_outcomes(failed=1, passed=1, skipped=2)
    assert failure(result) == [sentence]


@pytest.mark.parametrize(
    "body",
    ["while True:\n    pass", "while True:\n    try:\n        sum(range(1000))\n    except:\n        pass"],
    ids=["spins", "spins-and-swallows"],
)
def test_a_fit_that_never_ends(run, body):
    result = run(fit(body), "--trainloop-budget=0.2", "--trainloop-only=step_order")
    result.assert_outcomes(failed=1, passed=1)
    assert failure(result) == [
        "fit did not come back within 0.2 s after 0 steps; it must end when the batches it is given end "
        "(--trainloop-budget SECONDS allows more)"
    ]


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
    "batches-function-without-n": (
        builds("return loop(batches=lambda: [rows()])"),
        "TrainLoop.batches(13) raised TypeError: * takes 0 positional arguments but 1 was given",
        ["TypeError: *"],
    ),
    "batch-on-another-device": (
        fit("train(model, optimizer, ((x.to('meta'), y) for x, y in batches))"),
        "fit raised RuntimeError: Tensor on device cpu is not on the expected device meta!",
        ["in work", "in train", "mse(model, batch).backward()", "RuntimeError: Tensor on device cpu*"],
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
    result.assert_outcomes(failed=1, passed=1, skipped=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    said = pytest.LineMatcher(failure(result))
    said.fnmatch_lines([sentence.replace("[", "[[]"), *(f"*{line}" for line in traceback)])
    result.stdout.fnmatch_lines([f"  skipped  * (see {FIRST}): *"])


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
        "detach(), and torch refuses the backward pass",
    ),
    "float": (
        fit(BACKWARD.format("mse(model, batch).item()")),
        "gradient_reaches_every_param",
        "0.weight, 0.bias* get no gradient although the loss depends on them: the graph is cut by "
        "item(), and torch refuses the backward pass",
    ),
    "loss-without-history": (
        builds("return loop(fit=None, loss=lambda model, batch: mse(model, batch).detach())"),
        "gradient_reaches_every_param",
        "0.weight, 0.bias* get no gradient although the loss depends on them: the graph is cut by "
        "detach(), and torch refuses the backward pass",
    ),
    "optimizer-of-another-model": (
        builds("return loop(optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1))"),
        "optimizer_holds_every_param",
        "the optimizer holds none of the 4 parameters that train: it was built on another copy of the model",
    ),
}


@pytest.mark.parametrize(("source", "check", "summary"), NAMED.values(), ids=list(NAMED))
def test_a_fault_is_named_by_the_check_it_belongs_to(run, source, check, summary):
    result = run(source)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines([f"FAILED test_a.py::test_it[[]{check}[]] *"])
    said = failure(result)
    pytest.LineMatcher(said[:1]).fnmatch_lines([summary])
    assert said[-1] == f"more       pytest --trainloop-explain {check}"
    result.stdout.no_fnmatch_line("Traceback*")


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
        children = [os.fork()]
        if not children[0]:
            sys.exit(5)
        children.append(os.fork())
        if not children[1]:
            os._exit(6)
        assert [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children] == [5, 6]
        train(model, optimizer, batches)
    """),
}


@pytest.mark.parametrize("source", RIGHT.values(), ids=list(RIGHT))
def test_nothing_is_held_against_an_odd_but_right_loop(run, source):
    result = run(source)
    result.assert_outcomes(passed=4)
    assert result.ret == 0


def test_a_loop_that_swallows_its_own_mistake_is_not_passed(run):
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
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["*an exception swallowed inside the loop would look like this: step_order"])


def test_an_interrupt_ends_the_session_as_ever(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    source = HEAD + textwrap.indent(fit("raise KeyboardInterrupt"), "    ") + TAIL
    pytester.makepyfile(test_a=textwrap.dedent(source))
    result = pytester.inline_run("-p", "no:randomly", "--trainloop", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not (pytester.path / "went_on").exists()


@pytest.mark.parametrize("body", ["pytest.skip('no data')", "return loop(lambda *_: pytest.skip('no data'))"])
def test_a_skip_of_the_users_own_is_one(run, body):
    run(builds(body)).assert_outcomes(skipped=3, passed=1)


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
    result = run("", "--continue-on-collection-errors")
    result.assert_outcomes(errors=1, passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert failure(result) == [sentence]
