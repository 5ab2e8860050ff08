"""Attention in which no real position attends to a padded one: torch's attention calls with one more mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop.tracing.arguments import bound_arguments

if TYPE_CHECKING:
    from pytest_trainloop.checks.batch.padding_invariance.slices import Span

Given = tuple[tuple[Any, ...], dict[str, Any]]


def masked(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Given | None:
    """The arguments of the call with padded keys masked for real queries; None where it has none."""
    if name == "scaled_dot_product_attention":
        return _dot_product(args, kwargs, span)
    if name == "multi_head_attention_forward":
        return _multi_head(args, kwargs, span)
    if name == "softmax":
        return _softmax(args, kwargs, span)
    return None


def blocked_pairs(queries: int, keys: int, span: Span, device: torch.device) -> torch.Tensor | None:
    """The pairs of (queries, keys) with a real query and a padded key; all queries are real where they are not
    positions."""
    real = span.of(keys)
    if real is None:
        return None
    padded = _outside(keys, real, device)
    asked = span.of(queries) if queries == keys else None
    if asked is None:
        return padded.expand(queries, keys)
    return ~_outside(queries, asked, device)[:, None] & padded


def _outside(size: int, real: tuple[int, int], device: torch.device) -> torch.Tensor:
    place = torch.arange(size, device=device)
    return (place < real[0]) | (place >= real[1])


def _dot_product(args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Given | None:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    out = blocked_pairs(query.shape[-2], key.shape[-2], span, query.device)
    if out is None:
        return None
    if given.get("is_causal"):
        out = out | ~torch.ones_like(out).tril()
        given["is_causal"] = False
    given["attn_mask"] = _with(given.get("attn_mask"), out, query.dtype)
    rest = {k: v for k, v in given.items() if k not in ("query", "key", "value")}
    return (query, key, given["value"]), rest


def _multi_head(args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Given | None:
    given = bound_arguments(F.multi_head_attention_forward, args, kwargs)
    query, key = given["query"], given["key"]
    out = blocked_pairs(query.shape[0], key.shape[0], span, query.device)
    if out is None:
        return None
    attended, padding = (_as_numbers(given.get(name), query.dtype) for name in ("attn_mask", "key_padding_mask"))
    mask = _with(attended, out, query.dtype)
    return (), {**given, "attn_mask": mask, "key_padding_mask": padding, "is_causal": False}


def _as_numbers(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of multi-head attention, true at ignored keys, as numbers that are added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))


def _with(mask: torch.Tensor | None, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a mask (true at attended keys) adds to the scores, with these pairs masked too."""
    if mask is None:
        return torch.zeros(out.shape, dtype=dtype, device=out.device).masked_fill(out, float("-inf"))
    if mask.dtype is torch.bool:
        kept = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
        return kept.masked_fill(out, float("-inf"))
    return mask.masked_fill(out, float("-inf"))


def _softmax(args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> Given | None:
    scores = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(scores, torch.Tensor) or not isinstance(dim, int) or scores.dim() < 2:
        return None
    axis = dim % scores.dim()
    queries = scores.shape[-2] if axis == scores.dim() - 1 and scores.dim() > 2 else 1
    out = blocked_pairs(queries, scores.shape[axis], span, scores.device)
    if out is None:
        return None
    shape = [1] * scores.dim()
    shape[axis] = scores.shape[axis]
    if queries > 1:
        shape[-2] = queries
    masked_scores = scores.masked_fill(out.reshape(shape), float("-inf"))
    return ((masked_scores, *args[1:]), kwargs) if args else ((), {**kwargs, "input": masked_scores})


def inverted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span) -> bool:
    """Whether real queries attend to padded keys only: the weights of all real keys are exactly zero."""
    added = _added(name, args, kwargs)
    if added is None or added.dim() < 2:
        return False
    keys = span.of(added.shape[-1])
    if keys is None:
        return False
    out = _outside(added.shape[-1], keys, added.device)
    asked = span.of(added.shape[-2]) if added.dim() > 2 and added.shape[-2] == added.shape[-1] else None
    rows = added if asked is None else added.narrow(-2, asked[0], asked[1] - asked[0])
    real, padded = rows[..., ~out].amax(-1), rows[..., out].amax(-1)
    return bool((real + VANISHED < padded).all())


VANISHED = 1e3
"""Difference of scores from which the smaller one's weight is zero in float64: exp(-745) is."""


def _added(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What a mask adds to the scores, or the scores of a softmax over the last axis."""
    if name == "scaled_dot_product_attention":
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        return _as_numbers(~mask if mask is not None and mask.dtype is torch.bool else mask, args[0].dtype)
    if name == "multi_head_attention_forward":
        given = bound_arguments(F.multi_head_attention_forward, args, kwargs)
        return _as_numbers(given.get("key_padding_mask"), given["query"].dtype)
    scores = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return scores.detach() if dim in (-1, scores.dim() - 1) else None
