"""Epochs of a stream, and the order that is drawn for them."""

import itertools
import random
import threading

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from pytest_trainloop.checks.state.data_order.draws import orders_drawn, others_noted
from pytest_trainloop.checks.state.data_order.order import (
    alike,
    in_one_order,
    kept_by_cycle,
    one_batch,
    repeats,
    some_row_twice,
)
from pytest_trainloop.checks.state.data_order.streams import epochs_of, read

X, Y = torch.randn(24, 3), torch.arange(24)


class Reseeded(Sampler):
    def __len__(self):
        return 24

    def __iter__(self):
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist())


def reading(stream, **more):
    return read(lambda: stream, axis=0, pads=(), **more)


def loader(**options):
    return DataLoader(TensorDataset(X, Y), batch_size=4, **options)


def test_two_epochs_of_a_shuffled_loader():
    seen = reading(loader(shuffle=True))
    assert [len(epoch.batches) for epoch in seen.epochs] == [6, 6]
    assert seen.epochs[0].draws
    assert not in_one_order(seen, seen.epochs)
    assert sorted(seen.rows(0)) == sorted(seen.rows(1))


def test_one_order_that_is_drawn_each_time():
    seen = reading(loader(sampler=Reseeded()))
    assert alike(seen, epochs_of(seen)) == 2


def test_the_order_of_the_data_set_is_none_that_is_drawn():
    seen = reading(loader())
    assert not in_one_order(seen, seen.epochs)
    assert alike(seen, epochs_of(seen)) == 0


def test_an_iterator_is_read_once():
    assert len(reading(iter(loader())).epochs) == 1


def test_windows_of_a_stream_without_end():
    def endless():
        while True:
            yield from loader(shuffle=True)

    seen = reading(endless(), most=48)
    assert [len(epoch.batches) for epoch in epochs_of(seen)] == [6] * 8


def test_no_epoch_is_seen_in_draws_with_replacement():
    seen = reading(((X[rows], Y[rows]) for rows in torch.randint(24, (48, 4))), most=48)
    assert epochs_of(seen) == []
    assert some_row_twice(seen)


def test_repeated_batches_are_no_epoch_of_one():
    parts = [X[i : i + 4] for i in range(0, 24, 4)]
    seen = reading([part for part in parts for _ in range(3)])
    assert repeats(seen) == 3
    assert one_batch(seen) == 0


def test_one_batch_for_ever():
    assert one_batch(reading(itertools.repeat((X, Y)), most=48)) == 48


def test_a_buffer_that_is_filled_anew_is_read_when_it_is_given():
    buffer = torch.zeros(4, 3)

    def filled():
        for i in range(0, 24, 4):
            buffer.copy_(X[i : i + 4])
            yield buffer

    assert len(set(reading(filled()).rows(0))) == 24


def test_cycle_is_seen_once_it_begins_again():
    shuffled = loader(shuffle=True)
    assert kept_by_cycle(read(lambda: itertools.islice(itertools.cycle(shuffled), 5), axis=0, pads=()).passes) is None
    seen = read(lambda: itertools.islice(itertools.cycle(shuffled), 9), axis=0, pads=())
    assert kept_by_cycle(seen.passes) is not None


def test_an_exception_is_kept_with_its_place():
    def broken():
        yield X[:4], Y[:4]
        raise OSError("a file that is not there")

    seen = reading(broken())
    assert isinstance(seen.raised, OSError)
    assert seen.at == 1


def test_draws_of_python_and_numpy_are_noted_and_nothing_stays_replaced():
    before = random.shuffle, np.random.permutation, random.Random.shuffle
    drawn = []
    with others_noted(), orders_drawn(drawn):
        random.shuffle([1, 2, 3])
        random.Random(0).shuffle([1, 2, 3])
        np.random.permutation(4)
        np.random.default_rng(3)
        torch.randperm(4)
    names = ["random.shuffle", "Random.shuffle", "np.random.permutation", "np.random.default_rng", "randperm"]
    assert [name for name, _ in drawn] == names
    assert before == (random.shuffle, np.random.permutation, random.Random.shuffle)


def test_threads_that_read_at_once_leave_nothing_replaced():
    before = np.random.permutation
    threads = [threading.Thread(target=lambda: list(loader(shuffle=True))) for _ in range(4)]
    with others_noted():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert np.random.permutation is before
