"""The table of what each rank did, from made-up ranks."""

from __future__ import annotations

from pathlib import Path

from pytest_trainloop.ranks.facts import NOWHERE, Collective, Rank, Written
from pytest_trainloop.ranks.table import Table


def call(kind, size, steps=0, **more):
    return Collective(kind, "0", 0, bytes=size, steps=steps, **more)


def test_of_two_ranks():
    built = [call("all_gather", 8), call("broadcast", 48), call("broadcast", 16)]
    buckets = [call("all_reduce", 3 * 2**20, step, in_backward=True) for step in range(3)]
    metrics = call("barrier", 0, 1)
    first = Rank(
        0,
        collectives=(*built, *buckets[:2], metrics, buckets[2]),
        steps=3,
        written=(Written(str(Path.cwd() / "runs" / "last.pt"), NOWHERE, 2),),
    )
    second = Rank(1, collectives=(*built, *buckets[:2]), steps=2, ended="signal SIGKILL")
    assert str(Table.of([first, second], {"rows": ["0, 2", "1, 3"]})).splitlines() == [
        "                 rank 0                                  rank 1",
        "rows             0, 2                                    1, 3",
        "optimizer steps  3                                       2",
        "when built       1 all_gather (8 B), 2 broadcast (64 B)  1 all_gather (8 B), 2 broadcast (64 B)",
        "each step        1 all_reduce (3 MiB), 1 barrier         1 all_reduce (3 MiB)",
        "wrote            runs/last.pt                            -",
        "ended by         -                                       signal SIGKILL",
    ]


def test_rows_of_which_nothing_is_known_are_left_out():
    table = Table.of([Rank(0, steps=1), Rank(1, steps=1)])
    assert [(row.label, row.same) for row in table.rows] == [("optimizer steps", True)]
    assert table.to_json() == {"rows": [{"label": "optimizer steps", "cells": ("1", "1")}]}
