"""Batches of sequences of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.instruments.strategies.seeds import generator, seeds
from pytest_trainloop.instruments.strategies.tokens import reals, require_sizes

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class Sequences(NamedTuple):
    """A batch of sequences.

    Attributes
    ----------
    values
        normal random numbers, 0 after each row's length: (rows, positions, features), or (positions, rows, features)
    lengths
        int64, one per row
    """

    values: torch.Tensor
    lengths: torch.Tensor


def sequences(
    features: int,
    *,
    max_length: int = 8,
    min_length: int = 1,
    max_rows: int = 4,
    batch_first: bool = True,
    dtype: torch.dtype = torch.float32,
) -> SearchStrategy[Sequences]:
    """Sequences of different lengths, padded with zeros, and their lengths.

    Failures shrink to one row of the least length.

    >>> @given(strategies.sequences(features=3))
    ... def test_every_sequence_has_an_output(batch):
    ...     assert model(batch.values, batch.lengths).shape == (len(batch.lengths), 1)

    Parameters
    ----------
    features
        numbers per position
    max_length, min_length
        bounds of the lengths
    max_rows
        rows at most
    batch_first
        whether rows are dimension 0
    dtype
        of the values

    Raises
    ------
    UsageError
        there are no features, no rows, or no length between the bounds
    """
    if features < 1:
        raise UsageError(f"sequences of {features} features: at least 1 is needed")
    require_sizes(min_length, max_length, max_rows)

    def made(real: torch.Tensor, seed: int) -> Sequences:
        values = torch.randn(*real.shape, features, generator=generator(seed), dtype=dtype)
        values = values * real[..., None]
        return Sequences(values if batch_first else values.transpose(0, 1).contiguous(), real.sum(1))

    return st.builds(made, reals((min_length, max_length), max_rows, uneven=True), seeds())


def packed_sequences(
    features: int,
    *,
    max_length: int = 8,
    min_length: int = 1,
    max_rows: int = 4,
    dtype: torch.dtype = torch.float32,
) -> SearchStrategy[PackedSequence]:
    """Sequences of different lengths as a ``PackedSequence``, for recurrent layers; rows are not sorted by length.

    Arguments and exceptions as for ``sequences``.
    """
    drawn = sequences(features, max_length=max_length, min_length=min_length, max_rows=max_rows, dtype=dtype)
    return drawn.map(lambda s: pack_padded_sequence(s.values, s.lengths, batch_first=True, enforce_sorted=False))
