"""Seeds that values come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SEEDS = 2**16
"""Seeds of values are below it."""


def seeds() -> SearchStrategy[int]:
    return st.integers(0, SEEDS - 1)


def generator(seed: int) -> torch.Generator:
    """A source of values of its own: the ambient random state stays as it is."""
    return torch.Generator().manual_seed(seed)
