"""The line "ranks", from made-up launches."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from pytest_trainloop import Result
from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import RankResult
from pytest_trainloop.recording.events import Place
from pytest_trainloop.runs.ranks.facts import Collective, Launch, Rank
from pytest_trainloop.views.loop_facts.ranks import ranks


def result(weights, batches=9):
    return RankResult(record=types.SimpleNamespace(items=batches), states=2 * [{"weight": weights}])


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
    assert lines(*(Rank(n, result(b"same"), collectives=(bucket,), steps=1) for n in range(2))) == [
        ("ranks", "batches: 9 on each of 2", False, True),
        ("", "weights: as on rank 0 on each of 2", False, True),
        ("", "optimizer steps: 1 on each of 2", False, True),
        ("", "each step: 1 all_reduce (228 B) on each of 2", False, True),
    ]


def test_what_differs_is_marked():
    found = lines(Rank(0, result(b"one"), steps=2), Rank(1, result(b"other"), steps=2))
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


def test_calls_files_and_ends():
    def call(kind, size, steps=0, **more):
        return Collective(kind, "0", 0, bytes=size, steps=steps, **more)

    built = [call("all_gather", 8), call("broadcast", 48), call("broadcast", 16)]
    buckets = [call("all_reduce", 3 * 2**20, step, in_backward=True) for step in range(3)]
    calls = (*built, *buckets[:2], call("barrier", 0, 1), buckets[2])
    first = Rank(0, collectives=calls, steps=3, written={str(Path.cwd() / "runs" / "last.pt"): Place("train.py", 9)})
    second = Rank(1, collectives=(*built, *buckets[:2]), steps=2, ended="signal SIGKILL")
    assert [text for _, text, *_ in lines(first, second)] == [
        "optimizer steps: 3 (rank 0), 2 (rank 1) *",
        "when built: 1 all_gather (8 B), 2 broadcast (64 B) on each of 2",
        "each step: 1 all_reduce (3 MiB), 1 barrier (rank 0), 1 all_reduce (3 MiB) (rank 1) *",
        "wrote: runs/last.pt (rank 0), - (rank 1)",
        "ended by: - (rank 0), signal SIGKILL (rank 1)",
    ]
