"""Other values for a tensor of the batch, as its role allows them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.batches.values import additive, left_out, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def elsewhere(tensor: torch.Tensor, cells: torch.Tensor, sources: torch.Tensor) -> None:
    """Write to these places of each row what the same row holds at its sources."""
    for row in range(len(cells)):
        to, of = cells[row].nonzero(as_tuple=True), sources[row].nonzero(as_tuple=True)
        if len(to[0]) and len(of[0]):
            chosen = (torch.arange(len(to[0]), device=cells.device) * 3 + 1) % len(of[0])
            tensor[row][to] = tensor[row][of][chosen].clone()


def must_count(role: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Edits of which at least one changes the gradient of a loop that reads the tensor, each in words."""
    made: dict[str, Callable[[torch.Tensor], Iterator[tuple[str, torch.Tensor]]]] = {
        "mask": _hidden,
        "padding_mask": functools.partial(_hidden, padding=True),
        "lengths": _shorter,
        "weights": _weighted,
        "graph": _rewired,
        "inputs": _reordered,
    }
    for words, other in made.get(role, _nothing)(tensor):
        if not torch.equal(other, tensor):
            yield words, other


def _nothing(_tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Of segments: a model may know them otherwise, by borders or positions (segment_independence)."""
    yield from ()


def _hidden(mask: torch.Tensor, *, padding: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """A real place in the middle of each row: the last key of a causal model is read by no one."""
    real = ~left_out(mask) if not padding else mask == 0
    low = mask.min() if additive(mask) else 0
    for words, every in (("one more place of each row left out", 0), ("every other place left out", 2)):
        other = mask.clone()
        for row, own in ((mask_row, r) for mask_row, r in zip(_rows(other), _rows(real), strict=True)):
            places = own.nonzero()
            chosen = places[len(places) // 2 :][:1] if not every else places[1::every]
            if len(places) > 1:
                row[tuple(chosen.T)] = 1 if padding else low
        yield words, other


def _rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor] if tensor.dim() == 1 else list(tensor)


def _shorter(lengths: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The longest rows keep their length first: padded outputs are then as wide as before."""
    half = (lengths + 1).div(2, rounding_mode="floor").to(lengths.dtype)
    longest = lengths == lengths.max()
    yield "shorter rows cut to half", torch.where(longest, lengths, half)
    yield "all rows cut to half", half


def _weighted(weights: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight by a factor of its own: a common one is invisible where weights are normalised."""
    if weights.is_floating_point():
        factors = torch.linspace(0.5, 1.0, weights.numel(), device=weights.device, dtype=weights.dtype)
        yield "other weights", weights * factors.view(weights.shape)
    else:
        other = weights.clone().flatten()
        places = other.nonzero().flatten()
        other[places[::2]] = 0
        yield "every other weight 0", other.view(weights.shape)
    yield "weights in another order", weights.flip(0)


def _rewired(graph: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if whole(graph) and graph.dim() == 2 and len(graph) == 2:
        yield "other edges", torch.stack([graph[0], graph[1].roll(1)])
        yield "other edges", graph.roll(1, 1).flip(0)
    else:
        yield "another adjacency", graph.roll((1, 1), (-2, -1))
        thinned = graph.clone()
        thinned.flatten(-2)[..., ::3] = 0
        yield "another adjacency", thinned


def _reordered(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.dim():
        yield "rows in another order", tensor.flip(0)
        yield "rows in another order", tensor.roll(1, 0)
    if tensor.is_floating_point():
        yield "other values", tensor * 0.5 + 0.25
