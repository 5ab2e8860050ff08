"""The batches that ``fit`` is given."""

from __future__ import annotations

import itertools
import random
import threading
from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from pytest_trainloop.core.errors import UserCodeError
from pytest_trainloop.declare import nested
from pytest_trainloop.runs.batch_stream import EMPTY_PASSES, PASSES_WITHOUT_STEP, Batches, first_batches


class Stopped(Exception):
    pass


def stop():
    raise Stopped


class State:
    """What the loop has done so far, as the batches ask for it."""

    def __init__(self, spent=False, stepped=True):
        self.spent, self.stepped = spent, stepped


def given(count=5, state=None, read_ahead=None, double=False, **fields):
    state = state or State()
    loop = TrainLoop(model=nn.Linear(2, 1), fit=print, **fields)
    return Batches(
        loop,
        count,
        spent=lambda: state.spent,
        stepped=lambda: state.stepped,
        stop=stop,
        read_ahead=read_ahead,
        double=double,
    )


def numbered():
    for i in itertools.count():
        yield torch.full((2,), float(i))


def seen(batches):
    return [float(batch[0]) for batch in batches]


def test_one_batch_is_given_as_often_as_is_asked_for():
    batches = given(batch=torch.ones(2))
    assert isinstance(batches, Sequence)
    assert len(batches) == 5
    assert seen(batches) == [1.0] * 5
    assert seen(batches) == [1.0] * 5
    assert batches.taken == 10
    assert not batches.cut_short


def test_every_batch_is_a_copy_of_its_own():
    mine = {"x": torch.ones(2), "names": ["a"]}
    batches = given(batch=mine)
    for batch in batches:
        assert batch["x"].tolist() == [1.0, 1.0]
        batch["x"].zero_()
        batch["names"].append("b")
    assert mine["x"].tolist() == [1.0, 1.0]
    assert mine["names"] == ["a"]
    assert batches[0]["names"] == ["a"]
    kept = list(batches)
    assert len({batch["x"].data_ptr() for batch in kept}) == 5


Pair = namedtuple("Pair", "x y")


@dataclass
class Text:
    ids: Any
    mask: Any


class Slotted:
    __slots__ = ("x",)

    def __init__(self):
        self.x = torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2, dtype=torch.int32),
        Pair(torch.ones(2), torch.zeros(2)),
        Text(torch.ones(2), None),
        {"x": [torch.ones(2), 3], "y": "text"},
        Slotted(),
        [1.5, 2.5],
    ],
    ids=["tensor", "namedtuple", "dataclass", "nest", "slots", "numbers"],
)
def test_a_copy_is_of_the_same_kind(batch):
    (copy,) = given(1, batch=batch)
    assert type(copy) is type(batch)
    assert [t.dtype for t in nested.tensors(copy)] == [t.dtype for t in nested.tensors(batch)]
    assert copy is not batch


def test_they_can_be_indexed():
    batches = given(batches=numbered())
    assert float(batches[3][0]) == 3.0
    assert float(batches[-1][0]) == 4.0
    assert seen(batches[1:3]) == [1.0, 2.0]
    assert seen(reversed(batches)) == [4.0, 3.0, 2.0, 1.0, 0.0]
    with pytest.raises(IndexError):
        batches[5]


def test_they_are_empty_once_enough_was_seen():
    state = State()
    batches = given(state=state, batch=torch.ones(2))
    stream = iter(batches)
    next(stream)
    state.spent = True
    assert list(stream) == []
    assert list(batches) == []
    assert batches.taken == 1
    assert batches.cut_short


def test_a_loop_that_goes_on_over_spent_batches_is_stopped():
    batches = given(state=State(spent=True), batch=torch.ones(2))
    for _ in range(EMPTY_PASSES):
        assert list(batches) == []
    with pytest.raises(Stopped):
        iter(batches)


def test_a_loop_that_collects_its_batches_first_reads_ahead_so_far_only():
    state = State(stepped=False)
    batches = given(20, state=state, read_ahead=10, batch=torch.ones(2))
    assert len(list(batches)) == 10
    assert batches.held_back
    assert not batches.cut_short
    state.stepped = True
    assert len(list(batches)) == 20


def test_a_step_within_the_first_items_lifts_the_limit():
    state = State(stepped=False)
    batches = given(20, state=state, read_ahead=10, batch=torch.ones(2))
    for number, _ in enumerate(batches):
        state.stepped = number >= 9
    assert batches.taken == 20


def test_passes_without_a_step_do_not_go_on_for_ever():
    batches = given(2, state=State(stepped=False), batch=torch.ones(2))
    for _ in range(PASSES_WITHOUT_STEP + EMPTY_PASSES):
        assert len(list(batches)) == 2
    assert not batches.cut_short
    with pytest.raises(Stopped):
        iter(batches)


def loader(rows=6, **options):
    return DataLoader(TensorDataset(torch.arange(float(rows))), **options)


def test_a_data_loader_gives_its_batches_over_and_over():
    batches = given(5, batches=loader(batch_size=2))
    assert [x.tolist() for (x,) in batches] == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert [x.tolist() for (x,) in batches] == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]


def test_what_else_is_asked_of_them_the_loader_answers():
    batches = given(batches=loader(batch_size=2))
    assert batches.batch_size == 2
    assert len(batches.dataset) == 6
    assert batches.drop_last is False
    with pytest.raises(AttributeError):
        _ = batches.nothing_of_the_kind


def test_without_a_loader_there_is_nobody_to_ask():
    batches = given(batch=torch.ones(2))
    with pytest.raises(AttributeError, match="have no attribute 'dataset'; they are a sized sequence"):
        _ = batches.dataset


def test_private_names_are_not_asked_of_the_loader():
    with pytest.raises(AttributeError):
        _ = given(batches=loader())._iterator


@pytest.mark.parametrize("make", [list, tuple, set], ids=["list", "tuple", "set"])
def test_a_collection_goes_round(make):
    batches = given(5, batches=make([torch.zeros(2), torch.ones(2)]))
    assert sorted(seen(batches)[:2]) == [0.0, 1.0]
    assert seen(batches)[:2] == seen(batches)[2:4]


def test_a_function_is_asked_for_so_many():
    asked = []

    def make(n):
        asked.append(n)
        return itertools.islice(numbered(), n)

    batches = given(4, batches=make)
    assert seen(batches) == [0.0, 1.0, 2.0, 3.0]
    assert seen(batches) == [0.0, 1.0, 2.0, 3.0]
    assert asked == [4]


def test_a_generator_that_ends_early_ends_every_pass():
    batches = given(5, batches=itertools.islice(numbered(), 3))
    assert seen(batches) == [0.0, 1.0, 2.0]
    assert seen(batches) == [0.0, 1.0, 2.0]


def test_an_endless_generator_is_read_no_further_than_needed():
    read = []

    def stream() -> Iterator[torch.Tensor]:
        for i in itertools.count():
            read.append(i)
            yield torch.full((2,), float(i))

    batches = given(3, batches=stream())
    assert read == []
    assert seen(batches) == [0.0, 1.0, 2.0]
    assert read == [0, 1, 2]


def test_the_rows_of_a_tensor_are_batches_too():
    assert seen(given(2, batches=torch.tensor([[3.0], [4.0]]))) == [3.0, 4.0]


def test_in_float64_only_floating_tensors_change():
    (x, ids, half, z), *_ = given(
        batch=(torch.ones(2), torch.arange(2), torch.ones(2).bfloat16(), torch.ones(2, dtype=torch.complex64)),
        double=True,
    )
    assert [t.dtype for t in (x, ids, half, z)] == [torch.float64, torch.int64, torch.float64, torch.complex128]


def test_a_function_that_raises_is_the_users_own():
    def make(n):
        raise OSError("disk")

    with pytest.raises(UserCodeError, match=r"^TrainLoop.batches\(5\) raised OSError: disk$"):
        given(batches=make)


@pytest.mark.parametrize(
    "batch",
    [5, [1, 2], ["a", "b"], {"x": 1.5}, object(), Slotted(), (torch.ones(0), torch.ones(1)), (torch.ones(1), open)],
)
def test_what_may_well_be_a_batch(batch):
    nested.require_batch(batch, "batch")


def drawn_late(n):
    return (torch.randn(2) for _ in range(n))


def test_late_batches_are_those_of_a_list_whatever_the_loop_draws_in_between():
    in_advance = [batch.tolist() for batch in given(3, batches=lambda n: list(drawn_late(n)))]
    late = []
    for batch in given(3, batches=drawn_late):
        late.append(batch.tolist())
        torch.rand(len(late))
    assert late == in_advance
    assert [b.tolist() for b in first_batches(TrainLoop(model=nn.Linear(2, 1), batches=drawn_late), 3)] == in_advance


def test_drawing_a_batch_takes_nothing_from_the_generators_of_the_loop():
    def noise(**fields):
        torch.manual_seed(0)
        random.seed(0)
        return [(float(torch.rand(())), random.random()) for _ in given(3, **fields)]

    def numbers(n):
        return (torch.full((2,), random.random()) + torch.rand(2) for _ in range(n))

    assert noise(batches=numbers) == noise(batch=torch.ones(2))


def test_data_are_not_drawn_from_the_numbers_that_the_loop_draws():
    torch.manual_seed(0)
    noise = torch.randn(2)
    (batch,) = given(1, batches=drawn_late)
    assert not torch.equal(batch, noise)


def test_another_thread_draws_from_the_generators_as_they_are():
    batches, drawn = given(1, batches=drawn_late), []
    torch.manual_seed(0)
    thread = threading.Thread(target=lambda: drawn.extend(batches))
    thread.start()
    thread.join()
    torch.manual_seed(0)
    assert torch.equal(drawn[0], torch.randn(2))


def test_two_loops_that_share_the_generator_of_a_loader_are_given_the_same_batches():
    shuffling = torch.Generator()
    data = TensorDataset(torch.arange(32.0))

    def loop():
        return TrainLoop(
            model=nn.Linear(2, 1), batches=DataLoader(data, batch_size=4, shuffle=True, generator=shuffling)
        )

    first, second = (first_batches(loop(), 3) for _ in range(2))
    assert [b[0].tolist() for b in first] == [b[0].tolist() for b in second]
