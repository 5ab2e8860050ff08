"""Flags of ends beside rewards."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.batches.episodes import read_episodes, read_transitions
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


def test_flags_of_time_limits_alone():
    assert read_episodes(renamed(dones="truncated")).limits


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param({"rewards": torch.randn(8), "obs": torch.randn(8, 2)}, id="no flags"),
        pytest.param({"rewards": torch.randn(8), "dones": torch.zeros(8)}, id="no end"),
        pytest.param({"dones": (torch.arange(8) == 4).float(), "obs": torch.randn(8, 2)}, id="no rewards"),
        pytest.param(
            {"dones": (torch.arange(12) == 5).float(), "rewards": torch.cat([torch.randn(6), torch.zeros(6)])},
            id="padding behind the end",
        ),
        pytest.param(
            {
                "dones": (torch.arange(12) == 5).float(),
                "rewards": torch.randn(12),
                "valid": (torch.arange(12) < 6).float(),
            },
            id="a mask leaves out what is behind the end",
        ),
    ],
)
def test_no_episodes(batch):
    assert read_episodes(batch) is None


def test_ends_are_those_that_no_time_limit_sets():
    batch = {
        "rewards": torch.randn(4),
        "next_obs": torch.randn(4, 2),
        "done": torch.tensor([0.0, 1.0, 1.0, 0.0]),
        "truncated": torch.tensor([0.0, 0.0, 1.0, 0.0]),
    }
    found = read_transitions(batch)
    assert found.ends.tolist() == [False, True, False, False]
    assert found.certain
    del batch["truncated"]
    assert not read_transitions(batch).certain
    batch["done"] = torch.zeros(4)
    assert read_transitions(batch) is None
