"""The digits that scikit-learn bundles, split once and for all."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


@cache
def load_arrays() -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Images to train on, images to evaluate on, and their labels."""
    images, labels = load_digits(return_X_y=True)
    scaled = (images.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    split = train_test_split(scaled, labels.astype(np.int64), test_size=0.2, random_state=0, stratify=labels)
    return tuple(split)


def loaders(batch_size: int = 32) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """A shuffled loader to train on, and one to evaluate on."""
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, load_arrays())
    train = TensorDataset(train_images, train_labels)
    test = TensorDataset(test_images, test_labels)
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(test, batch_size=360)
