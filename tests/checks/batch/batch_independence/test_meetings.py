"""Rows that meet outside of the model: what is measured, and the fewest rows that show it."""

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop import check_loop
from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.checks.batch.batch_independence.meetings import meeting
from pytest_trainloop.checks.batch.batch_independence.shares import AS_IT_IS, RowShares
from pytest_trainloop.runs.evidence import Evidence
from tests.checks.batch.batch_independence import faults_outside
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import PAIRS
from tests.loops.plain import loop

FAULTY = [pair for pair in PAIRS.values() if pair.faulty.__module__ == faults_outside.__name__]


def evidence(loss_of, batch=None, **fields):
    return Evidence(lambda: loop(mlp(6, 8, 3), batch or data.labelled(), loss_of, **fields))


def squares(model, batch):
    return (model(batch[0]) - F.one_hot(batch[1], 3)).square()


@pytest.mark.parametrize("pair", FAULTY[::4], ids=lambda pair: pair.name)
def test_three_rows_show_it(pair):
    report = check_loop(pair.faulty, only=["batch_independence"], raises=False)
    (finding,) = [f for result in report.results for f in result.findings]
    assert finding.composition is not None
    assert len(finding.composition.rows) <= 3
    assert finding.smallest == f"rows {list(finding.composition.rows)}, as a batch of their own"


def test_two_steps_are_made_of_a_loop_whose_rows_are_apart():
    found = evidence(lambda m, b: squares(m, b).mean())
    found.run()
    found.shared(makes_own_data)  # which is asked once
    before = found.own_steps
    found.shared(RowShares.of)
    assert meeting(found) is None
    assert found.own_steps - before == 2


def test_a_count_scales_all_shares():
    """The root of the mean square: the share of each row is divided by the root."""
    shares = evidence(lambda m, b: squares(m, b).mean().sqrt()).shared(RowShares.of)
    shift = shares.independence()
    assert shift.apart
    assert not shift.equal


def test_shares_of_rows_that_are_sorted_first_are_found_row_by_row():
    length = torch.tensor([3, 9, 1, 7, 5, 8, 2, 6, 4, 10, 13, 11, 17, 15, 18, 12])

    def loss_of(model, batch):
        order = batch["length"].argsort()
        return squares(model, (batch["x"][order], batch["y"][order])).mean()

    x, y = data.labelled()
    shares = evidence(loss_of, {"x": x, "y": y, "length": length}).shared(RowShares.of)
    order = length[: shares.rows].argsort().tolist()
    for row in range(shares.rows):
        assert shares.entered_at(row) == {0: frozenset({order.index(row)})}


def test_inputs_that_were_standardised_by_the_batch_are_scattered():
    def loss_of(model, batch):
        return squares(model, ((batch[0] - batch[0].mean(0)) / batch[0].std(0), batch[1])).mean()

    found = evidence(loss_of)
    assert found.shared(RowShares.of).scattered()
    assert meeting(found).why == "unknown"


def test_targets_are_what_never_enters_the_model():
    shares = evidence(lambda m, b: squares(m, b).mean()).shared(RowShares.of)
    assert shares.inputs() == {(0,)}
    assert shares.targets() == {(1,)}
    assert shares.tape(AS_IT_IS).double


def test_the_statistic_that_rows_meet_in_is_named():
    def loss_of(model, batch):
        losses = squares(model, batch).sum(1)
        return (losses / losses.detach().std()).mean() + model(batch[0]).square().mean()

    met = meeting(evidence(loss_of))
    assert met.why == "unknown"
    assert met.call.name == "std"


@pytest.mark.parametrize("shift", [1, 3])
def test_a_constant_shift_is_meant(shift):
    met = meeting(evidence(lambda m, b: squares(m, (b[0], b[1].roll(shift))).mean()))
    assert met.why == "unknown"


def test_targets_repeated_in_another_order_than_rows_are_other_rows_targets():
    def loss_of(model, batch, together):
        x, y = batch[0].repeat_interleave(3, 0), batch[1]
        return squares(model, (x, y.repeat_interleave(3) if together else y.repeat(3))).mean()

    assert meeting(evidence(lambda m, b: loss_of(m, b, together=True))) is None
    assert meeting(evidence(lambda m, b: loss_of(m, b, together=False))).why == "permuted"


def test_each_copy_of_the_batch_may_be_shifted_by_rows_of_its_own():
    def loss_of(model, batch):
        y = batch[1]
        return squares(model, (torch.cat([batch[0]] * 2), torch.cat([y, y.roll(1)]))).mean()

    met = meeting(evidence(loss_of))
    assert met is None or met.why == "unknown"
