"""Batches for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from hypothesis import strategies as st

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.instruments.strategies.seeds import generator, seeds

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Side = Literal["right", "left"]


def token_batches(
    vocab_size: int,
    *,
    max_length: int = 8,
    min_length: int = 1,
    max_rows: int = 4,
    pad_id: int | None = 0,
    pad_side: Side | Literal["both"] = "right",
    ignore_index: int = -100,
    mask_id: int | None = None,
) -> SearchStrategy[dict[str, torch.Tensor]]:
    """Batches of a language model: ``input_ids``, ``attention_mask`` and ``labels``, (rows, positions) of int64.

    The largest id and length 1 occur. No real token is ``pad_id`` or ``mask_id``. Failures shrink to one row of the
    least length without padding.

    >>> @given(strategies.token_batches(config.vocab_size, max_length=config.n_positions))
    ... def test_the_loss_is_finite(batch):
    ...     assert model(**batch).loss.isfinite()

    Parameters
    ----------
    vocab_size
        ids are below it
    max_length, min_length
        bounds of the tokens in a row
    max_rows
        rows at most
    pad_id
        the id at padded positions; None: all rows have one length
    pad_side
        "right", "left", or "both": either, from batch to batch
    ignore_index
        the label at padded positions
    mask_id
        None: labels are the ids, not shifted, as causal models of transformers take them. An id: a masked model's
        batches, in which some ids are replaced by it and only these have labels

    Raises
    ------
    UsageError
        the vocabulary has no token besides padding, an id is not in it, or no length is between the bounds
    """
    tokens = [i for i in range(vocab_size) if i not in (pad_id, mask_id)]
    if not tokens:
        raise UsageError(f"a vocabulary of {vocab_size} has no token besides padding: give a larger vocab_size")
    for name, value in (("pad_id", pad_id), ("mask_id", mask_id)):
        if value is not None and not 0 <= value < vocab_size:
            raise UsageError(f"{name}={value} is no id of a vocabulary of {vocab_size}")
    require_sizes(min_length, max_length, max_rows)
    return _token_batches(
        torch.tensor(tokens), (min_length, max_length), max_rows, pad_id, pad_side, ignore_index, mask_id
    )


@st.composite
def _token_batches(
    draw: st.DrawFn,
    tokens: torch.Tensor,
    bounds: tuple[int, int],
    max_rows: int,
    pad_id: int | None,
    pad_side: str,
    ignore_index: int,
    mask_id: int | None,
) -> dict[str, torch.Tensor]:
    real = draw(reals(bounds, max_rows, uneven=pad_id is not None))
    largest = draw(st.booleans())
    left = draw(st.sampled_from(["right", "left"])) == "left" if pad_side == "both" else pad_side == "left"
    source = generator(draw(seeds()))
    ids = tokens[torch.randint(max(1, len(tokens) - 1), real.shape, generator=source)]
    if largest:
        ids[0, 0] = tokens[-1]
    labels = ids.clone()
    if mask_id is not None:
        hidden = real & (torch.rand(real.shape, generator=source) < 0.3)
        hidden[:, 0] |= ~hidden.any(1)  # no row without a label
        ids, labels = ids.masked_fill(hidden, mask_id), labels.masked_fill(~hidden, ignore_index)
    batch = {
        "input_ids": ids.masked_fill(~real, pad_id or 0),
        "attention_mask": real.long(),
        "labels": labels.masked_fill(~real, ignore_index),
    }
    return {name: tensor.flip(1) for name, tensor in batch.items()} if left else batch


def require_sizes(min_length: int, max_length: int, max_rows: int) -> None:
    if not 1 <= min_length <= max_length:
        raise UsageError(f"no row has {min_length} to {max_length} positions: give min_length= from 1 to max_length=")
    if max_rows < 1:
        raise UsageError(f"max_rows={max_rows}: at least 1 is needed")


@st.composite
def reals(draw: st.DrawFn, bounds: tuple[int, int], max_rows: int, *, uneven: bool) -> torch.Tensor:
    """Which of (rows, positions) are real, padding on the right; one row at least has no padding."""
    least, most = bounds
    rows = draw(st.integers(1, max_rows))
    longest = draw(st.integers(least, most))
    missing = [draw(st.integers(0, longest - least)) if uneven else 0 for _ in range(rows)]
    lengths = longest - torch.tensor(missing)
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]
