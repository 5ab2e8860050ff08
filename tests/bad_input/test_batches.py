"""Batches that cannot be judged, and functions that split them: refused once, in one sentence with its line."""

from __future__ import annotations

import re
import textwrap

import pytest

from pytest_trainloop import check_loop
from tests.helpers.plugin_sessions import HEAD
from tests.helpers.refusals import judged, values_of

NEEDS_BATCHES = "a DataLoader, an iterable, or a function batches(n) is needed"
NEEDS_ROW = "at least one row is needed"
PARTS_NEEDED = (
    "a list of 2 batches is needed, each of the kind of the batch: a tuple with tensors of shapes (8, 4), (8, 1)"
)
NO_AXIS = "no tensor of the batch has such a dimension (a tuple with tensors of shapes (8, 4), (8, 1))"

BATCH = {
    "batch-without-rows": (
        "loop(batch=rows(0))",
        f"TrainLoop.batch is empty: a tuple with tensors of shapes (0, 4), (0, 1); {NEEDS_ROW}",
    ),
    **values_of(
        "batch",
        "a batch with at least one tensor is needed",
        {
            "'data.csv'": "is the string 'data.csv'",
            "Path('data.csv')": "is a PosixPath without tensors",
            "rows": "is the function rows",
            "torch.utils.data.DataLoader": "is the class DataLoader",
            "True": "is True",
            "{}": "is a dict without tensors",
            "()": "is a tuple without tensors",
            "(None, None)": "is a tuple without tensors",
            "nn.Linear(2, 2)": "is a Linear without tensors",
        },
    ),
    "batch-none": ("loop(batch=None)", "TrainLoop got neither batch nor batches; an example batch is needed"),
    "batch-on-meta": (
        "loop(batch=tuple(t.to('meta') for t in rows()))",
        "TrainLoop.batch holds a tensor on the meta device, which has no values; a batch with data is needed",
    ),
    "batch-with-a-history": (
        "x, y = rows()\nreturn loop(batch=(x, mlp()(x)))",
        "TrainLoop.batch holds a tensor with a history; detach it: a batch is data, not a result of the model",
    ),
    "batch-with-an-open-file": (
        "loop(batch=(*rows(), open(__file__)))",
        "TrainLoop.batch cannot be copied (TypeError: cannot pickle '_io.TextIOWrapper' object); a batch of plain data "
        "is needed, since every run gets a fresh copy",
    ),
    **values_of(
        "batches",
        NEEDS_BATCHES,
        {
            "5": "is 5",
            "'data.csv'": "is the string 'data.csv'",
            "dict(x=rows()[0])": "is a dict with tensors of shapes (8, 4)",
        },
    ),
    "batches-empty": ("loop(batch=None, batches=[])", "TrainLoop.batches gave no batch; at least one is needed"),
    "batches-empty-loader": (
        "loop(batch=None, batches=torch.utils.data.DataLoader([]))",
        "TrainLoop.batches gave no batch: its data set has 0 items; at least one is needed",
    ),
    "batches-of-strings": (
        "loop(batches=['a', 'b'])",
        "TrainLoop.batches[0] is the string 'a'; a batch with at least one tensor is needed",
    ),
    "batches-one-without-rows": (
        "loop(batches=[rows(), rows(0)])",
        f"TrainLoop.batches[1] is empty: a tuple with tensors of shapes (0, 4), (0, 1); {NEEDS_ROW}",
    ),
    "batches-function-that-gives-nothing": (
        """
        def draw(n):  # here
            return None
        return loop(batches=draw)
        """,
        f"TrainLoop.batches(13) gave None; {NEEDS_BATCHES}",
    ),
    "batches-function-without-n": (
        "return loop(batches=lambda: [rows()])  # here",
        "TrainLoop.batches takes (), and is called as batches(n) for n batches",
    ),
    **values_of(
        "batch_dim",
        "the one that its rows lie along is needed",
        {"7": f"is 7, and {NO_AXIS}", "-3": f"is -3, and {NO_AXIS}"},
    ),
    "dimension-out-of-range-of-batches": (
        "loop(batch=None, batches=[rows()], batch_dim=2)",
        f"TrainLoop.batch_dim is 2, and {NO_AXIS}; the one that its rows lie along is needed",
    ),
    "padded-dimension-out-of-range": (
        "from pytest_trainloop import Padding\nreturn loop(padding=Padding(pad_id=0, dim=2))",
        f"TrainLoop.padding: dim is 2, and {NO_AXIS}; the one that is padded is needed",
    ),
    "padded-tensor-that-is-not-there": (
        "from pytest_trainloop import Padding\n"
        "x, y = rows()\n"
        "fit = lambda m, o, b: train(m, o, [tuple(one.values()) for one in b])\n"
        "return loop(fit, batch={'x': x, 'y': y}, padding=Padding(of=('x', 'mask')))",
        "TrainLoop.padding: the batch has no tensor mask: there are x, y",
    ),
    "role-of-a-tensor-that-is-not-there": (
        "from pytest_trainloop import Roles\n"
        "x, y = rows()\n"
        "fit = lambda m, o, b: train(m, o, [tuple(one.values()) for one in b])\n"
        "return loop(fit, batch={'x': x, 'y': y}, roles=Roles(weights='w'))",
        "TrainLoop.roles: weights: the batch has no tensor w: there are x, y",
    ),
    "padded-tensor-that-is-not-in-batches": (
        "from pytest_trainloop import Padding\n"
        "x, y = rows()\n"
        "fit = lambda m, o, b: train(m, o, [tuple(one.values()) for one in b])\n"
        "return loop(fit, batch=None, batches=[{'x': x, 'y': y}] * 4, "
        "padding=[Padding(of='y'), Padding(of=('x', 'z'))])",
        "TrainLoop.padding: the batch has no tensor z: there are x, y",
    ),
    **values_of(
        "batch_dim",
        "the number of a dimension is needed, as in batch_dim=1",
        {"'1'": "is '1'", "True": "is True"},
    ),
    "split-takes-the-batch-only": (
        "return loop(split_batch=lambda b: b)  # here",
        "TrainLoop.split_batch takes (b), and is called as split_batch(batch, k)",
    ),
    "split-number": ("loop(split_batch=4)", "TrainLoop.split_batch is an int; a function is needed"),
}

SPLIT = """
    @pytest.mark.trainloop
    def test_it(accumulate=1):
        return loop(lambda m, o, b: windows(m, o, b, accumulate), split_batch={})  # here

    def windows(model, optimizer, batches, accumulate):
        for i, batch in enumerate(batches):
            (mse(model, batch) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
"""

SPLITS = {
    f"split-gives-{name}": (SPLIT.format(function), f"TrainLoop.split_batch(batch, 2) gave {words}; {PARTS_NEEDED}")
    for name, function, words in (
        ("the-batch", "lambda b, k: b", "2 parts (a tensor of shape (8, 4) among them)"),
        ("one", "lambda b, k: [b]", "1 part"),
        ("nothing", "lambda b, k: None", "None"),
    )
}

TAKEN = {
    "arrays": (
        "import numpy as np\n"
        "def fit(m, o, b):\n    train(m, o, ([torch.from_numpy(a) for a in batch] for batch in b))\n"
        "return loop(fit, batch=tuple(t.numpy() for t in rows()))",
        "ndarray",
    ),
    "text": (
        "def fit(m, o, b):\n    train(m, o, ((torch.tensor([[*map(float, x)] for x in xs]), y) for xs, y in b))\n"
        "return loop(lambda m, o, b: fit(m, o, ((x, torch.ones(2, 1)) for x in b)), batch=['1234', '5678'])",
        "str",
    ),
}


def judged_alone(name, check):
    scope: dict = {}
    exec(textwrap.dedent(HEAD) + "def make():\n" + textwrap.indent(TAKEN[name][0], "    "), scope)
    (result,) = check_loop(scope["make"], only=[check], raises=False).results
    return result.outcome, result.reason


@pytest.mark.parametrize("name", TAKEN)
def test_rows_are_taken_from_other_data_than_tensors_and_inputs_are_not_exchanged(name):
    assert judged_alone(name, "batch_independence") == ("passed", "")
    assert judged_alone(name, "input_dependence") == (
        "skipped",
        f"the batch holds no tensors but {TAKEN[name][1]}, so that its rows are not known: hand over tensors "
        "(torch.from_numpy, ids in place of text) and convert nothing in fit",
    )


REFUSED = {
    name: (source if "return" in source else f"return {source}", sentence)
    for name, (source, sentence) in (BATCH | SPLITS).items()
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("batches"), {name: source for name, (source, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_once_in_one_sentence(said, name):
    sentence, found = REFUSED[name][1], said[name]
    (failure,) = found.failures
    assert re.sub(r" \(test_loops\.py:\d+\)$", "", failure) == sentence
    assert re.search(r" \(test_loops\.py:(\d+)\)$", failure)[1] == str(found.here) or not found.here
    if name not in SPLITS:  # what the checks that split nothing find stays
        assert len(found.skips) == 2
        assert all(reason.startswith(sentence) and " (see test_loops.py::" in reason for reason in found.skips)
