"""Several processes of torch.distributed: what they give back, and how each of them may end."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pytest_trainloop.core.errors import CannotDecide, TimeRanOut
from pytest_trainloop.runs.ranks.launch import launch


def run(work, ranks=2, timeout=60):
    return launch(work, ranks, timeout=timeout)


def test_closures_run_and_their_values_come_back():
    start = torch.arange(3.0)

    def work(rank):
        total = start + rank
        dist.all_reduce(total)
        return total, os.environ["RANK"], os.environ["WORLD_SIZE"]

    ranks = run(work)
    assert [(r.value[0].tolist(), *r.value[1:]) for r in ranks] == [([1, 3, 5], "0", "2"), ([1, 3, 5], "1", "2")]
    assert ranks.hang is ranks.raised is None
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_buckets_of_ddp_are_told_with_the_line_of_backward():
    def work(rank):
        model = DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()  # here
            optimizer.step()

    for rank in run(work):
        buckets = [c for c in rank.collectives if c.kind == "all_reduce"]
        assert [(c.shapes, c.in_backward, c.steps) for c in buckets] == [
            (((4,),), True, 0),
            (((4,),), True, 1),
        ]
        assert buckets[0].place.code.endswith("# here")
        assert rank.steps == 2


def test_a_rank_that_waits_for_one_that_has_left():
    def work(rank):
        if rank == 0:
            dist.barrier()

    hang = run(work).hang
    assert (hang.rank, hang.collective.kind, hang.line.code) == (0, "barrier", "dist.barrier()")
    assert [(o.number, o.how) for o in hang.others] == [(1, "left")]


def test_a_rank_that_has_left_and_whose_loader_lives_on():
    """Worker processes hold the sockets of the rank that they are forks of."""

    def work(rank):
        loader = iter(DataLoader(range(64), num_workers=1, multiprocessing_context="fork"))
        next(loader)
        model = DistributedDataParallel(nn.Linear(3, 1))
        for _ in range(3 - rank):
            model(torch.randn(4, 3)).sum().backward()
        return kept.append(loader)

    kept = []
    assert run(work).hang.rank == 0


def test_different_shapes():
    hang = run(lambda rank: dist.all_reduce(torch.ones(3 + rank))).hang
    assert hang.different
    assert {hang.collective.shapes, hang.others[0].last.shapes} == {((3,),), ((4,),)}


def test_ranks_that_wait_for_each_other_in_two_groups():
    def work(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        dist.barrier(group=groups[rank])

    launched = run(work)
    assert launched.hang.others[0].how == "waited"
    assert launched.waiting == (0, 1)


def test_an_exception_of_one_rank_is_told_apart_from_what_follows():
    def work(rank):
        model = DistributedDataParallel(nn.Linear(3, 1))
        if rank:
            raise ValueError("a batch is missing")
        model(torch.randn(4, 3)).sum().backward()

    launched = run(work)
    assert launched.raised.number == 1
    assert launched.raised.raised.summary == "ValueError: a batch is missing"
    assert launched.waiting == (0,)


def test_a_rank_that_exits():
    def work(rank):
        if rank:
            os._exit(3)
        dist.barrier()

    launched = run(work)
    assert (launched.raised.number, launched.raised.ended, launched.waiting) == (1, "exit status 3", (0,))


def test_the_time_limit_shows_where_each_rank_is(capfd):
    def work(rank):
        while rank:
            time.sleep(0.01)

    with pytest.raises(TimeRanOut) as caught:
        run(work, timeout=0.5)
    assert "0 steps of 2 ranks (rank 0 has ended, rank 1 at tests/ranks/test_launch.py:" in str(caught.value)
    assert "in work" in capfd.readouterr().err


def test_the_project_makes_its_own_group():
    def work(rank):
        dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=2)
        total = torch.ones(1)
        dist.all_reduce(total)
        return dist.get_backend(), total.item()

    assert [r.value for r in run(work)] == [("gloo", 2.0)] * 2


def test_a_group_of_one_in_this_process_is_left_to_it():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [r.value for r in run(lambda rank: dist.get_world_size())] == [2, 2]
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_one_of_several_processes_starts_no_ranks():
    def work(rank):
        return launch(lambda inner: inner, 2, timeout=20)

    with pytest.raises(CannotDecide, match="run pytest without torchrun"):
        run(work)


def test_files_are_told_with_their_lines(tmp_path):
    def work(rank):
        torch.save({}, tmp_path / "last.pt")  # here
        (tmp_path / f"log{rank}").write_text("")

    for number, rank in enumerate(run(work)):
        assert {path: place.code for path, place in rank.written.items()} == {
            str(tmp_path / "last.pt"): 'torch.save({}, tmp_path / "last.pt")  # here',
            str(tmp_path / f"log{number}"): '(tmp_path / f"log{rank}").write_text("")',
        }


def test_a_collective_that_is_not_waited_for_and_one_in_inference_mode():
    def work(rank):
        with torch.inference_mode():
            dist.all_reduce(torch.ones(2))
        works = [dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX, async_op=True) for _ in range(2)]
        return [w.wait() for w in works]

    for rank in run(work):
        assert [c.waits for c in rank.collectives] == [True, False, False]
