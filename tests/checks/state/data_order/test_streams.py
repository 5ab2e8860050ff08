"""Draws of an order are noted, and nothing stays replaced."""

import random
import threading

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop.checks.state.data_order.reading import orders_drawn, others_noted


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
    loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=4, shuffle=True)
    threads = [threading.Thread(target=lambda: list(loader)) for _ in range(4)]
    with others_noted():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert np.random.permutation is before
