"""Batches that cannot be judged, and functions that split them: refused once, in one sentence with its line."""

from __future__ import annotations

import re
import textwrap

import pytest

from pytest_trainloop import check_loop
from tests.helpers.plugin_sessions import HEAD
from tests.helpers.refusals import judged

NEEDS_TENSOR = "a batch with at least one tensor is needed"
NEEDS_BATCHES = "a DataLoader, an iterable, or a function batches(n) is needed"
NEEDS_ROW = "at least one row is needed"

BATCH = {
    "batch-without-rows": (
        "loop(batch=rows(0))",
        f"TrainLoop.batch is empty: a tuple with tensors of shapes (0, 4), (0, 1); {NEEDS_ROW}",
    ),
    "batch-path": ("loop(batch='data.csv')", f"TrainLoop.batch is the string 'data.csv'; {NEEDS_TENSOR}"),
    "batch-pathlib": (
        "loop(batch=Path('data.csv'))",
        f"TrainLoop.batch is a PosixPath without tensors; {NEEDS_TENSOR}",
    ),
    "batch-function": ("loop(batch=rows)", f"TrainLoop.batch is the function rows; {NEEDS_TENSOR}"),
    "batch-class": (
        "loop(batch=torch.utils.data.DataLoader)",
        f"TrainLoop.batch is the class DataLoader; {NEEDS_TENSOR}",
    ),
    "batch-true": ("loop(batch=True)", f"TrainLoop.batch is True; {NEEDS_TENSOR}"),
    "batch-empty-dict": ("loop(batch={})", f"TrainLoop.batch is a dict without tensors; {NEEDS_TENSOR}"),
    "batch-empty-tuple": ("loop(batch=())", f"TrainLoop.batch is a tuple without tensors; {NEEDS_TENSOR}"),
    "batch-of-none": ("loop(batch=(None, None))", f"TrainLoop.batch is a tuple without tensors; {NEEDS_TENSOR}"),
    "batch-model": (
        "loop(batch=nn.Linear(2, 2))",
        f"TrainLoop.batch is a Linear without tensors; {NEEDS_TENSOR}",
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
    "batches-number": ("loop(batches=5)", f"TrainLoop.batches is 5; {NEEDS_BATCHES}"),
    "batches-path": ("loop(batches='data.csv')", f"TrainLoop.batches is the string 'data.csv'; {NEEDS_BATCHES}"),
    "batches-one-batch": (
        "loop(batches=dict(x=rows()[0]))",
        f"TrainLoop.batches is a dict with tensors of shapes (8, 4); {NEEDS_BATCHES}",
    ),
    "batches-empty": ("loop(batch=None, batches=[])", "TrainLoop.batches gave no batch; at least one is needed"),
    "batches-empty-loader": (
        "loop(batch=None, batches=torch.utils.data.DataLoader([]))",
        "TrainLoop.batches gave no batch: its data set has 0 items; at least one is needed",
    ),
    "batches-of-strings": (
        "loop(batches=['a', 'b'])",
        f"TrainLoop.batches[0] is the string 'a'; {NEEDS_TENSOR}",
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
    "dimension-out-of-range": (
        "loop(batch_dim=7)",
        "TrainLoop.batch_dim is 7, and no tensor of the batch has such a dimension (a tuple with tensors of shapes "
        "(8, 4), (8, 1)); the one that its rows lie along is needed",
    ),
    "dimension-before-the-first": (
        "loop(batch_dim=-3)",
        "TrainLoop.batch_dim is -3, and no tensor of the batch has such a dimension (a tuple with tensors of shapes "
        "(8, 4), (8, 1)); the one that its rows lie along is needed",
    ),
    "dimension-out-of-range-of-batches": (
        "loop(batch=None, batches=[rows()], batch_dim=2)",
        "TrainLoop.batch_dim is 2, and no tensor of the batch has such a dimension (a tuple with tensors of shapes "
        "(8, 4), (8, 1)); the one that its rows lie along is needed",
    ),
    "padded-dimension-out-of-range": (
        "from pytest_trainloop import Padding\nreturn loop(padding=Padding(pad_id=0, dim=2))",
        "TrainLoop.padding: dim is 2, and no tensor of the batch has such a dimension (a tuple with tensors of shapes "
        "(8, 4), (8, 1)); the one that is padded is needed",
    ),
    "padded-tensor-that-is-not-there": (
        "from pytest_trainloop import Padding\n"
        "x, y = rows()\n"
        "fit = lambda m, o, b: train(m, o, [tuple(one.values()) for one in b])\n"
        "return loop(fit, batch={'x': x, 'y': y}, padding=Padding(of=('x', 'mask')))",
        "TrainLoop.padding: the batch has no tensor mask: there are x, y",
    ),
    "padded-tensor-that-is-not-in-batches": (
        "from pytest_trainloop import Padding\n"
        "x, y = rows()\n"
        "fit = lambda m, o, b: train(m, o, [tuple(one.values()) for one in b])\n"
        "return loop(fit, batch=None, batches=[{'x': x, 'y': y}] * 4, "
        "padding=[Padding(of='y'), Padding(of=('x', 'z'))])",
        "TrainLoop.padding: the batch has no tensor z: there are x, y",
    ),
    "dimension-string": (
        "loop(batch_dim='1')",
        "TrainLoop.batch_dim is '1'; the number of a dimension is needed, as in batch_dim=1",
    ),
    "dimension-true": (
        "loop(batch_dim=True)",
        "TrainLoop.batch_dim is True; the number of a dimension is needed, as in batch_dim=1",
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
    "split-gives-the-batch": (
        SPLIT.format("lambda b, k: b"),
        "TrainLoop.split_batch(batch, 2) gave 2 parts (a tensor of shape (8, 4) among them); a list of 2 "
        "batches is needed, each of the kind of the batch: a tuple with tensors of shapes (8, 4), (8, 1)",
    ),
    "split-gives-one": (
        SPLIT.format("lambda b, k: [b]"),
        "TrainLoop.split_batch(batch, 2) gave 1 part; a list of 2 batches is needed, each of the kind of the batch: "
        "a tuple with tensors of shapes (8, 4), (8, 1)",
    ),
    "split-gives-nothing": (
        SPLIT.format("lambda b, k: None"),
        "TrainLoop.split_batch(batch, 2) gave None; a list of 2 batches is needed, each of the kind of the batch: "
        "a tuple with tensors of shapes (8, 4), (8, 1)",
    ),
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


@pytest.mark.parametrize("name", TAKEN)
def test_inputs_that_are_no_tensors_cannot_be_exchanged(name):
    scope: dict = {}
    source, kinds = TAKEN[name]
    exec(textwrap.dedent(HEAD) + "def make():\n" + textwrap.indent(source, "    "), scope)
    (result,) = check_loop(scope["make"], only=["input_dependence"], raises=False).results
    assert (result.outcome, result.reason) == (
        "skipped",
        f"the batch holds no tensors but {kinds}, so that its rows cannot be told: hand over tensors "
        "(torch.from_numpy, ids in place of text) and convert nothing in fit",
    )


@pytest.mark.parametrize("name", TAKEN)
def test_rows_are_taken_from_other_data_than_tensors(name):
    scope: dict = {}
    source, _ = TAKEN[name]
    exec(textwrap.dedent(HEAD) + "def make():\n" + textwrap.indent(source, "    "), scope)
    (result,) = check_loop(scope["make"], only=["batch_independence"], raises=False).results
    assert result.outcome == "passed"


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
