"""What cannot be judged is refused in one sentence."""

from __future__ import annotations

import pytest

from tests.helpers.plugin_sessions import (  # noqa: F401  some are fixtures
    FIRST,
    OTHERS,
    all_of_torch_is_loaded,
    builds,
    failure,
    fit,
    one_file,
    the_process_is_left_as_it_was,
)

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
        "TrainLoop got neither fit nor step nor loss; give the project's own loop as a function: "
        "fit=lambda batches: train(model, batches) (fit=train(...) would call it, and give what it returns: None)",
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
        "TrainLoop.frozen: no parameter is 'backbone.' or lies below it; the first names are "
        "0.weight, 0.bias, 2.weight, 2.bias",
    ),
    "frozen-string": (
        builds("return loop(frozen='0.')"),
        "TrainLoop.frozen is the string '0.'; a tuple of paths is needed: ('0.',)",
    ),
    "frozen-number": (
        builds("return loop(frozen=(0,))"),
        "TrainLoop.frozen names an int; paths of modules or parameters are needed, as in ('backbone.',)",
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
}


@pytest.mark.parametrize(("source", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_refused_in_one_sentence(run, source, sentence):
    result = run(source)
    result.assert_outcomes(failed=1, passed=1, skipped=OTHERS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert failure(result) == [sentence]
    result.stdout.fnmatch_lines([f"  skipped  gradient_reaches_every_param, step_order, *: * (see {FIRST})*"])


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
    assert failure(result) == [sentence]


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
    result = run("", "--continue-on-collection-errors")
    result.assert_outcomes(errors=1, passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert failure(result) == [sentence]
