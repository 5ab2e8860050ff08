"""The parts of ``evaluation_is_pure``: the line of a change, groups of what differs, seeds inside ``fit``."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, observe
from pytest_trainloop.checks.state.evaluation_is_pure import generators
from pytest_trainloop.checks.state.evaluation_is_pure.changed_at import ChangedAt
from pytest_trainloop.checks.state.evaluation_is_pure.check import MOST_CULPRITS, _left
from pytest_trainloop.checks.state.evaluation_is_pure.judgement import Judgement
from pytest_trainloop.checks.state.evaluation_is_pure.left import (
    Group,
    Left,
    cause_of,
    groups,
    holder_of,
    in_words,
    named,
)
from pytest_trainloop.reach.leaves import Leaf
from pytest_trainloop.reach.snapshot import Difference
from pytest_trainloop.runs.evidence import Evidence


def line_of(change):
    """The source of the line at which ``change`` first makes ``state`` another."""
    state = {"x": 0}
    at = ChangedAt(lambda: state["x"] != 0)
    with at.watching():
        change(state)
    return at.place.code


def deeper(state):
    state["y"] = 1
    state["x"] = 2  # here
    state["x"] = 3


def calls_deeper(state):
    for _ in range(3):
        state["z"] = 0
    deeper(state)
    state["x"] = 4


def by_a_library(state):
    state["y"] = 1
    F.relu(torch.zeros(1))
    dict.update(state, x=5)  # in C
    state["y"] = 2


def raises(state):
    try:
        state["x"] = 6
        raise ValueError
    except ValueError:
        state["x"] = 7


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (calls_deeper, 'state["x"] = 2  # here'),
        (by_a_library, "dict.update(state, x=5)  # in C"),
        (raises, 'state["x"] = 6'),
        (lambda state: None, ""),
    ],
)
def test_the_line_after_which_a_value_is_another(change, line):
    assert line_of(change) == line


def difference(path, kind, component="", before=1, after=2, reached_from=("model",)):
    leaf = Leaf(path, kind, component or path, frozenset(reached_from))
    return Difference(leaf, before, after, "changed")


def test_groups_are_what_one_statement_changes():
    found = groups(
        [
            difference("model.a", "weight", "weights of model"),
            difference("model.b", "weight", "weights of other"),
            difference("model.1.training", "mode", "mode of model.1"),
            difference("model.seen", "scalar"),
            difference("generator", "generator"),
        ]
    )
    assert [(group.component, len(group.paths), group.ours) for group in found] == [
        ("weights", 2, True),
        ("modes", 1, True),
        ("model.seen", 1, True),
        ("generator", 1, False),
    ]


def test_many_components_are_put_back_by_kind():
    found = groups([difference(f"trainer.s{i}", "scalar") for i in range(20)] + [difference("model.p", "tensor")])
    assert [(group.kind, len(group.paths)) for group in found] == [("scalar", 20), ("tensor", 1)]


@pytest.mark.parametrize(
    ("kind", "steps", "cause"),
    [
        ("weight", 0, "weights_left"),
        ("weight", 2, "evaluation_trains"),
        ("gradient", 0, "gradients_left"),
        ("buffer", 0, "buffers_moved_by_evaluation"),
        ("requires_grad", 0, "state_left"),
        ("group_value", 0, "feedback"),
        ("switch", 0, "switch_left"),
        ("scalar", 0, "state_left"),
    ],
)
def test_the_cause_follows_from_the_kind(kind, steps, cause):
    assert cause_of(Group(kind, "c", [difference("p", kind)]), steps) == cause


def test_rows_written_in_place_are_data_and_a_state_is_not():
    rows = difference("inputs", "tensor", before=torch.zeros(4, 2), after=torch.ones(4, 2), reached_from=("evaluate",))
    drawn = difference("scale", "tensor", before=None, after=torch.ones(()), reached_from=("batches",))
    hidden = difference("model.hidden", "tensor", before=torch.zeros(4, 2), after=torch.ones(4, 2))
    assert [cause_of(Group("tensor", "c", [d]), 0) for d in (rows, drawn, hidden)] == [
        "data_changed",
        "data_changed",
        "state_left",
    ]


def test_names_are_those_a_reader_looks_for():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    loop = TrainLoop(model=model, batch=torch.ones(2, 2), fit=lambda batches: None)
    modes = [difference(f"model{path}.training", "mode", "modes") for path in ("", ".0", ".1")]
    assert named(Group("mode", "modes", modes), loop) == ("model.1",)
    assert named(Group("gradient", "g", [difference("model.0.weight.grad", "gradient", "g")]), loop) == (
        "model.0.weight",
    )
    rows = [difference(f"queue[{i}]", "tensor", "queue") for i in range(9)]
    assert named(Group("tensor", "queue", rows), loop) == ("queue",)


def test_a_finding_names_few_of_many_and_says_how_many():
    finding = _left(Left("weights_left", component="weights", paths=tuple(f"model.{i}.weight" for i in range(20))))
    assert len(finding.culprits) == MOST_CULPRITS
    assert "model.1.weight and 18 more" in finding.summary


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (0.25, "scalar", "0.25"),
        (True, "mode", "training"),
        (4, "length", "of 4 entries"),
        (torch.tensor(2.5), "buffer", "2.5"),
        (torch.ones(3), "tensor", ""),
        (torch.float64, "switch", "torch.float64"),
    ],
)
def test_values_in_words(value, kind, words):
    assert in_words(value, kind) == words


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        ("average.module.0.weight", "average.module"),
        ("ema.shadow['0.weight']", "ema.shadow"),
        ("kept[3]", "kept"),
    ],
)
def test_the_holder_of_the_same_bits(holder, name):
    assert holder_of({"model.0.weight": ("model.0.weight", "optimizer.x", holder)}) == name


def test_seeds_are_noted_with_their_generator():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seen = []
    try:
        with generators.noted_seeds(seen.append):
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
    assert [generators.generator_of(seed.call) for seed in seen] == [
        generators.TORCH,
        generators.NUMPY,
        generators.PYTHON,
    ]
    assert "torch.manual_seed(0)" in str(seen[0].place)


def train(*, seeds, steps=9):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(8, 4)
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step % 3 == 2:
            model.eval()
            if seeds:
                torch.manual_seed(0)
            with torch.no_grad():
                model(x + torch.randn(8, 4))
            model.train()


@pytest.mark.parametrize("seeds", [True, False])
def test_a_run_that_is_observed_once(seeds):
    state = torch.get_rng_state()
    try:
        with observe() as record:
            train(seeds=seeds)
    finally:
        torch.set_rng_state(state)
    (result,) = record.check("evaluation_is_pure", raises=False).results
    assert [(f.cause, f.level) for f in result.findings] == ([("reseeds", "fault")] if seeds else [])
    assert (result.outcome, result.needs) == (("failed", "") if seeds else ("skipped", "evaluate="))
    assert result.reason.startswith("" if seeds else "watching once does not offer evaluate: an evaluation inside fit")


def looped(evaluate_of, fit_of=None):
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=torch.randn(6, 4),
            fit=fit_of(fit) if fit_of else fit,
            evaluate=evaluate_of(model),
        )

    return make


def test_a_right_evaluation_takes_fifteen_steps():
    evidence = Evidence(looped(lambda model: lambda: model(torch.ones(2, 4)).sum().item()))
    evidence.run()
    before = evidence.own_steps
    made = Judgement.of(evidence)
    assert (made.left, made.raised, made.reseeding, made.skip) == ([], None, None, "")
    assert evidence.own_steps - before == 15


def test_a_loop_that_trains_once_is_judged_between_two_of_its_steps():
    def once(fit):
        calls = []

        def only(batches):
            calls.append(1)
            if len(calls) == 1:
                fit(batches)

        return only

    def scaling(model):
        def evaluate():
            with torch.no_grad():
                model[0].weight.mul_(0.5)

        return evaluate

    (left,) = Judgement.of(Evidence(looped(scaling, once))).left
    assert (left.cause, left.level, left.paths) == ("weights_left", "fault", ("model.0.weight",))


def test_the_grad_mode_is_put_back_for_who_runs_the_check():
    assert torch.is_grad_enabled()
    Judgement.of(Evidence(looped(lambda model: lambda: torch.set_grad_enabled(False))))
    assert torch.is_grad_enabled()
