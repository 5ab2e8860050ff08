"""What rank 0 of a script concludes from what the ranks tell it. Both are in this process."""

from __future__ import annotations

import threading

import pytest

from pytest_trainloop.runs.ranks import peers
from pytest_trainloop.runs.ranks.facts import Collective
from pytest_trainloop.runs.ranks.peers import Peers, reported, store_at


@pytest.fixture
def pair(monkeypatch):
    """The ranks, and the store that they share."""
    for name, seconds in (("WAITS", 0.2), ("FAILED", 0.2), ("SILENT", 0.5), ("GOING", 0.1), ("OFTEN", 0.01)):
        monkeypatch.setattr(peers, name, seconds)
    store = store_at("127.0.0.1", 0, new=True)
    return *(Peers("127.0.0.1", store.port, number, 2) for number in (0, 1)), store


def call_of(kind="all_reduce", number=0, *, waits=True, entries=3):
    call = Collective(kind, "0", number, shapes=((entries,),), dtypes=("float32",), even=True, waits=waits)
    return "0", (0, 1), call


def calls(rank, kind="all_reduce", **more):
    rank.tell("collective", call_of(kind, **more))


def ends(rank, how="left", failure=""):
    rank.tell("end", (how, failure, ""))
    rank.tell("result", rank.number)
    rank.flush()


def test_ranks_that_come_to_their_end(pair):
    zero, one, store = pair
    for rank in (one, zero):
        calls(rank)
        rank.tell("step", 1)
        ends(rank)
    launched = zero.gathered()
    assert [(rank.value, rank.steps, len(rank.collectives)) for rank in launched] == [(0, 1, 1), (1, 1, 1)]
    assert launched.hang is None
    assert reported(store) is None
    leaving = threading.Thread(target=one.leave)
    leaving.start()
    zero.report(1)
    leaving.join(10)
    assert reported(store) == 1


@pytest.mark.parametrize("waits", [True, False], ids=["it waits", "its result is waited for"])
def test_a_rank_that_waits_for_one_that_has_left_is_ended(pair, waits):
    zero, one, _ = pair
    ended = threading.Event()
    calls(one, waits=waits)
    with one.listening(lambda: (ends(one), ended.set(), threading.Event().wait(0.3))):
        ends(zero)
        launched = zero.gathered()
        assert ended.wait(5)
    assert launched.hang.rank == 1
    assert launched.hang.collective.kind == "all_reduce"
    assert [(other.number, other.how) for other in launched.hang.others] == [(0, "left")]


def test_ranks_that_make_different_calls_are_ended(pair):
    zero, one, _ = pair
    calls(zero)
    calls(one, "barrier")
    one.flush()
    zero.flush()
    ends(zero)
    ends(one)
    assert zero.gathered().hang.different


def test_a_call_that_differs_from_that_of_another_rank_is_not_made(pair):
    zero, one, _ = pair
    for number in (0, 1):
        zero.wait_if_different(*call_of(number=number))
    one.wait_if_different(*call_of())
    waiting = threading.Thread(target=one.wait_if_different, args=call_of(number=1, entries=4), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()


def test_where_one_rank_fails_the_others_are_ended(pair):
    zero, _, _ = pair
    ends(zero, "raised", "no data")
    launched = zero.gathered()  # the other says nothing, and is given up
    assert zero.failures() == {0: "no data"}
    assert [rank.value for rank in launched] == [0, None]
    assert launched.hang is None


def test_a_large_result_is_sent_in_pieces(pair, monkeypatch):
    monkeypatch.setattr(peers, "PIECE", 1000)
    zero, one, _ = pair
    one.tell("result", bytes(range(256)) * 100)
    one.flush()
    ends(zero)
    assert zero.gathered()[1].value == bytes(range(256)) * 100


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "2", "MASTER_PORT": "x"}])
def test_without_torchrun_there_are_none(variables, monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0"} | variables).items():
        monkeypatch.setenv(name, value)
    assert Peers.of_torchrun() is None
