"""Flags of ends beside rewards."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.instruments.batches.episodes import read_episodes
from tests.loops.segmented import rollout


def renamed(**names):
    batch = rollout()
    return {names.get(name, name): value for name, value in batch.items()}


@pytest.mark.parametrize("name", ["dones", "terminated", "episode_starts", "is_first"])
def test_the_last_end_that_leaves_steps_on_both_sides(name):
    found = read_episodes(renamed(dones=name))
    assert found is not None
    assert not found.limits
    (over_time,) = found.borders
    assert [(b.at, b.step) for b in over_time] == [((0,), 9), ((1,), 7), ((2,), 5)]


def test_flags_that_are_0_at_the_end():
    batch = rollout()
    batch["not_done"] = 1 - batch.pop("dones")
    assert torch.equal(read_episodes(batch).ends, rollout()["dones"] == 1)
