"""The line "ranks", from made-up launches."""

from __future__ import annotations

import types

import pytest

from pytest_trainloop.cards.ranks import ranks
from pytest_trainloop.checks.scale.distributed_equivalence.ledger import Seen
from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
from pytest_trainloop.finding import Result
from pytest_trainloop.ranks.facts import Collective, Launch, Rank


def did(weights, batches=9):
    return Did(record=types.SimpleNamespace(items=batches), seen=Seen(digests=[{"weight": weights}]))


def lines(*made, knobs=("ranks",), outcome="passed"):
    results = {}
    if outcome:
        results["distributed_equivalence"] = Result(check="distributed_equivalence", outcome=outcome, reason="why")
    facts = types.SimpleNamespace(
        evidence=types.SimpleNamespace(knobs=dict.fromkeys(knobs)),
        results=results,
        ask=lambda kind: Launch(tuple(made)),
    )
    return [(line.label, line.text, line.odd, line.seen) for line in ranks(facts)]


def test_ranks_that_do_the_same():
    bucket = Collective("all_reduce", "0", 0, bytes=228, in_backward=True)
    assert lines(*(Rank(n, did(b"same"), collectives=(bucket,), steps=1) for n in range(2))) == [
        ("ranks", "batches: 9 on each of 2", False, True),
        ("", "weights: as on rank 0 on each of 2", False, True),
        ("", "optimizer steps: 1 on each of 2", False, True),
        ("", "each step: 1 all_reduce (228 B) on each of 2", False, True),
    ]


def test_what_differs_is_marked():
    found = lines(Rank(0, did(b"one"), steps=2), Rank(1, did(b"other"), steps=2))
    assert ("", "weights: as on rank 0 (rank 0), other than on rank 0 (rank 1) *", True, True) in found


def test_ranks_that_were_ended():
    assert lines(Rank(0, steps=1), Rank(1, steps=2)) == [
        ("ranks", "optimizer steps: 1 (rank 0), 2 (rank 1) *", True, True)
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"knobs": ()}, []),
        ({"outcome": ""}, [("ranks", "not looked at: distributed_equivalence was not run", False, False)]),
        ({"outcome": "skipped"}, [("ranks", "not looked at: why", False, False)]),
    ],
)
def test_where_nothing_was_seen(given, said):
    assert lines(**given) == said
