"""What a forked process finds of its parent does not stop it."""

from __future__ import annotations

import gc
import types

import torch.distributed as dist

from pytest_trainloop.runs.ranks.launch import launch


def test_a_group_that_the_parent_has_left_to_the_collector_is_never_ended_in_a_fork():
    gc.collect()
    gc.disable()
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        kept = types.SimpleNamespace(group=dist.group.WORLD)
        kept.cycle = kept
        del kept
        dist.destroy_process_group()
        ranks = launch(lambda rank: gc.collect() >= 0, 2, timeout=20)
        assert [rank.value for rank in ranks] == [True, True]
    finally:
        gc.enable()
