"""Launches that did not come to their end, made by hand."""

import pytest

from pytest_trainloop.checks.scale.distributed_equivalence.own_batches import of_ending
from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import RankResult, results_of
from pytest_trainloop.core.errors import CannotDecide, UserCodeError
from pytest_trainloop.core.finding import UserError
from pytest_trainloop.recording.events import Place, Raised
from pytest_trainloop.recording.record import Record
from pytest_trainloop.runs.ranks.facts import Collective, Hang, Launch, Other, Rank

UNREDUCED = "Expected to have finished reduction in the prior iteration before starting a new one."


def result(raised="", *, ended=True, late=()):
    record = Record(ended=ended)
    if raised:
        record.raised = Raised(
            kind="RuntimeError", summary=raised, traceback="", place=Place("train.py", 9), message=raised
        )
    return RankResult(record, late=late)


def launched(*results, hang=None):
    return Launch(tuple(Rank(number, value=made) for number, made in enumerate(results)), hang)


def waiting(last=None, how="left"):
    call = Collective("all_reduce", "0", 4, place=Place("train.py", 40), steps=3)
    return Hang(0, call, (Other(1, how, last),))


def test_what_gloo_raises_in_a_rank_that_lost_another_is_no_exception_of_the_loop():
    lost = result("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", ended=False)
    found = of_ending(Launch((Rank(0, value=lost), Rank(1, value=result())), waiting(), waiting=(0,)))
    assert found.cause == "one_rank_waits"


def test_another_call_at_another_line_is_told_by_its_line():
    call = Collective("broadcast", "0", 4, place=Place("train.py", 40))
    other = Collective("broadcast", "0", 4, place=Place("train.py", 50))
    found = of_ending(launched(None, None, hang=Hang(0, call, (Other(1, "waited", other),), different=True)))
    assert "rank 1 is at another line, and waits in another broadcast there: train.py:50" in found.summary
    same_line = Hang(0, call, (Other(1, "waited", call),), different=True)
    assert "broadcast of other shapes" in of_ending(launched(None, None, hang=same_line)).summary


def test_a_rank_that_we_stopped_leaves_the_others_waiting_through_no_fault_of_the_loop():
    with pytest.raises(CannotDecide, match="unequally often"):
        of_ending(launched(None, result(ended=False), hang=waiting()))


def test_the_loops_own_exception_is_told_and_the_rank_that_waits_for_it_is_not_blamed():
    with pytest.raises(UserCodeError, match=r"fit with ranks=2 \(rank 1\) raised ValueError: bad shape"):
        of_ending(launched(None, result("ValueError: bad shape"), hang=waiting()))


def test_a_device_that_is_not_here_is_a_reason_to_skip():
    told = "ValueError: SyncBatchNorm expected input tensor to be on GPU or PrivateUse1"
    with pytest.raises(CannotDecide, match="a device that is not here"):
        of_ending(launched(result(told), result(told)))


def test_what_ended_a_run_in_a_rank_is_raised_here():
    refused = RankResult(refused=("CannotDecide", ("the model is built differently",)))
    with pytest.raises(CannotDecide, match="built differently"):
        of_ending(launched(refused, result()))


def test_what_the_project_raises_while_it_is_built_names_its_rank_and_stops_no_other_check():
    refused = "UserCodeError", (UserError(stage="building the loop", summary="KeyError: 'NODE_RANK'"),)
    with pytest.raises(UserCodeError, match=r"building the loop with ranks=2 \(rank 1\) raised KeyError") as caught:
        results_of(Launch((Rank(0, RankResult()), Rank(1, RankResult(refused=refused)))))
    assert caught.value.one_check
    assert caught.value.__context__ is None
