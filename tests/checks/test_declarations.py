"""What a declaration changes in the verdict on a loop of the corpus."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop, check_loop
from tests.loops.corpus import ODD, PAIRS


def result_of(check, make, **chosen):
    (result,) = check_loop(make, only=[check], raises=False, **chosen).results
    return result


@pytest.mark.parametrize(
    ("check", "name", "fields", "expected"),
    [
        ("batch_independence", "table_that_is_one_batch", {"rows_interact": False}, "normalised_over_rows fault"),
        ("causality", "the_mask_is_lost_in_evaluation", {"evaluate": None}, "mask_missing_in_eval advice"),
        ("determinism", "generator_at_module_level", {"nondeterministic": False}, "state_outside_loop fault"),
        ("determinism", "sum_in_order_of_arrival", {"nondeterministic": False}, "nondeterministic_kernel fault"),
    ],
)
def test_the_verdict_follows_it(check, name, fields, expected):
    def declared():
        loop = PAIRS[name].faulty() if name in PAIRS else ODD[name].make()
        for field, value in fields.items():
            setattr(loop, field, value)
        return loop

    assert [f"{f.cause} {f.level}" for f in result_of(check, declared).findings] == [expected]


def test_a_shuffled_loader_that_leaves_one_row_makes_a_row_of_length_one_a_fault():
    def make():
        loop = PAIRS["a_meter_that_was_read_once_has_no_spread"].faulty()
        given = loop.batches
        loop.batches = DataLoader(given.dataset, given.batch_size, shuffle=True, collate_fn=given.collate_fn)
        return loop

    assert [(f.cause, f.level) for f in result_of("edge_batches", make).findings] == [("nan_at_length_one", "fault")]


def test_declared_steps_make_slow_learning_a_fault():
    options = {"overfit_one_batch": {"steps": 300}}
    (fault,) = result_of("overfit_one_batch", PAIRS["plateau_of_saturated_layers"].faulty, options=options).faults
    assert fault.cause == "learns_slowly"
    assert "steps=300 declares that it is learned by then" in fault.summary


@pytest.mark.parametrize(("powers", "expected"), [(0, []), (1, [("mean_of_means", "note")])])
def test_a_declared_loss_without_the_knob_has_a_note_where_its_mean_is_weighted(powers, expected):
    def weighted(model, batch):
        x, y = batch
        weights = (x[:, :1].abs() + 0.5) ** powers
        return ((model(x) - y).square() * weights).sum() / weights.sum()

    def make():
        return TrainLoop(model=nn.Linear(3, 1), batch=(torch.randn(12, 3), torch.randn(12, 1)), loss=weighted)

    assert [(f.cause, f.level) for f in result_of("accumulation_equivalence", make).findings] == expected
