"""Operations over all segments at once, and what they would give within each segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.recording.torch_names import EXTREMES, REDUCTIONS, RESHAPES, SOFTMAXES
from pytest_trainloop.tracing.forward_pass import grads, recomputed, weighted_sum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.batches.segments import Segments
    from pytest_trainloop.tracing.forward_pass import Op, Replacement

FixKind = Literal["softmax", "statistics", "attention", "convolution"]

_SPLITS = frozenset("split split_with_sizes tensor_split chunk".split())

_STATISTICS = REDUCTIONS - {"nansum", "nanmean", "median", "std_mean", "var_mean", "logsumexp"}


def fixes(
    ops: Sequence[Op], segments: Segments, *, pooled_only: bool = False
) -> Iterator[tuple[FixKind, tuple[Op, ...], Replacement]]:
    """The fixes to try, each of one kind of operation; ``pooled_only``: not those that leave a statistic for each
    entry, since a loss may standardise by the batch."""
    over = tuple(op for op in ops if op.name in SOFTMAXES and _runs_over_entries(op, segments))
    if over:
        yield "softmax", over, lambda op: _softmax_within(op, segments)
    taken = tuple(op for op in ops if op.name in _STATISTICS and takes_away(op, segments))
    if taken:
        for shape in ("segments",) if pooled_only else ("entries", "column", "segments"):
            yield "statistics", taken, lambda op, shape=shape: _statistic(op, segments, shape)  # type: ignore[misc]
    pairwise = tuple(op for op in ops if _scores(op, segments) is not None)
    if pairwise and not pooled_only:
        yield "attention", pairwise, lambda op: _masked(op, segments)
    over = tuple(op for op in ops if _convolved(op, segments) is not None)
    if over and not pooled_only:
        yield "convolution", over, lambda op: _convolution_within(op, segments)


def keeps_apart(op: Op, segments: Segments) -> bool:
    """Whether the operation could let segments meet by its shape: an attention over all entries."""
    return _scores(op, segments) is not None


def _convolved(op: Op, segments: Segments) -> tuple[int, int] | None:
    """Of a convolution along the axis of the entries, the positions that were added at its left, and the results."""
    if op.name != "conv1d" or not op.inputs or len(op.outputs) != 1 or segments.ids.dim() != 2:
        return None
    given, out, (rows, length) = op.inputs[0], op.outputs[0], segments.ids.shape
    if given.dim() != 3 or len(given) != rows or out.shape[-1] < length or given.shape[-1] < length:
        return None
    added = given.shape[-1] - length
    before = given[..., :added] if added else given[..., :0]
    if added and not bool((before == 0).all()):
        return None
    return added, out.shape[-1]


def _convolution_within(op: Op, segments: Segments) -> torch.Tensor:
    """The convolution of each segment with zeros in place of the others."""
    found = _convolved(op, segments)
    if found is None or not op.args:
        return op.out  # type: ignore[no-any-return]
    added, length = found
    given, rest = op.args[0], op.args[1:]
    out, ids = torch.zeros_like(op.out), segments.ids
    behind = torch.full((len(ids), length - ids.shape[1]), -1, device=ids.device)
    of_inputs = torch.cat([ids[:, :1].expand(-1, added), ids], 1)
    of_results = torch.cat([ids, behind], 1)
    for segment in [*range(segments.count), -1]:
        here, there = (of_inputs == segment)[:, None], (of_results == segment)[:, None]
        if bool(there.any()):
            out = torch.where(there, op.func(given * here, *rest, **op.kwargs), out)
    return out


def _runs_over_entries(op: Op, segments: Segments) -> bool:
    """Whether the operation runs over the axis of the entries, and not over one of all pairs of them."""
    given = op.inputs[0] if op.inputs else None
    axis = _entry_axis(op, segments)
    return (
        given is not None and axis is not None and _axis(op) == axis and list(given.shape).count(given.shape[axis]) == 1
    )


def takes_away(op: Op, segments: Segments) -> bool:
    """Whether the operation's input has the entries and its output does not."""
    return (
        bool(op.inputs)
        and len(op.outputs) > 0
        and segments.of_entries(op.inputs[0]) is not None
        and all(segments.of_entries(t) is None for t in op.outputs)
        and _axis(op) in (None, _entry_axis(op, segments))
    )


def mixes(op: Op, segments: Segments) -> bool:
    """Whether what the operation gives for one segment depends on what it is given for another."""
    if not any(t.requires_grad and segments.of(t) is not None for t in op.outputs):
        return op.name in _STATISTICS and takes_away(op, segments)
    inputs, outputs = recomputed(op)
    held = [(t, ids) for t in inputs if (ids := segments.of(t)) is not None]
    for out in outputs:
        ids = segments.of(out) if out.requires_grad else None
        for segment in (0, segments.count - 1) if ids is not None and held else ():
            total = weighted_sum(out[ids == segment])
            for (_, by), gradient in zip(held, grads(total, [t for t, _ in held]), strict=True):
                if gradient is not None:
                    reached = (gradient != 0).reshape(*by.shape, -1).any(-1)
                    if bool((by[reached] != segment).any()):
                        return True
    return False


def reshaped(op: Op, segments: Segments) -> bool:
    """Whether the operation cuts the entries into parts, one for each segment, of which one holds entries of two."""
    if op.name in _SPLITS and len(op.outputs) == segments.count > 1 and op.inputs and segments.ids.dim() == 1:
        ids = segments.of_entries(op.inputs[0])
        parts = [len(out) for out in op.outputs]
        if ids is None or ids.dim() != 1 or sum(parts) != len(ids):
            return False
        return any(len(set(part.tolist())) > 1 for part in torch.split(ids, parts))
    if op.name not in RESHAPES or len(op.outputs) != 1 or not op.inputs:
        return False
    given, out = op.inputs[0], op.outputs[0]
    ids = segments.of_entries(given)
    if ids is None or ids.dim() != 1 or len(out) != segments.count or len(given) != len(ids):
        return False
    if out.dim() < 2 or segments.count == len(ids) or len(set(segments.sizes)) == 1:
        return False
    numbers = ids.reshape(-1, *[1] * (given.dim() - 1)).expand(given.shape).reshape(out.shape).flatten(1)
    return bool((numbers != numbers[:, :1]).any())


def _entry_axis(op: Op, segments: Segments) -> int | None:
    """The axis of the entries in the first input."""
    given = op.inputs[0] if op.inputs else None
    ids = None if given is None else segments.of_entries(given)
    return None if ids is None else ids.dim() - 1


def _axis(op: Op) -> int | None:
    """The axis over which the operation runs; None for all, -1 where it is not known."""
    dim = op.kwargs.get("dim", op.kwargs.get("axis"))
    if dim is None:
        rest = [a for a in op.args[1:] if isinstance(a, (int, tuple, list)) and not isinstance(a, bool)]
        if op.name in ("norm",):
            rest = rest[1:] if rest and isinstance(op.args[1], (int, float)) else rest
        dim = rest[0] if rest else None
    if isinstance(dim, (tuple, list)):
        if len(dim) != 1:
            return None if len(dim) == op.inputs[0].dim() else -1
        dim = dim[0]
    if dim is None or not op.inputs:
        return None
    return int(dim) % max(op.inputs[0].dim(), 1)


def _softmax_within(op: Op, segments: Segments) -> torch.Tensor:
    given = op.inputs[0]
    ids = segments.of_entries(given)
    axis = 0 if ids is None else ids.dim() - 1
    out = torch.zeros_like(given)
    flat = None if ids is None else ids.reshape(-1, ids.shape[-1])[0] if axis == 0 or ids.shape[0] == 1 else None
    if flat is None:
        return op.out  # type: ignore[no-any-return]
    for segment in range(-1, segments.count):
        here = (flat == segment).nonzero().flatten()
        if len(here):
            part = given.index_select(axis, here)
            soft = part.softmax(axis) if op.name == "softmax" else part.log_softmax(axis)
            out = out.index_copy(axis, here, soft)
    return out


def _statistic(op: Op, segments: Segments, shape: str) -> Any:
    """The statistic of each segment: one for each of its "entries", the same as a "column" where it is one number, or
    one for each of the "segments"."""
    given = op.inputs[0]
    ids = segments.of_entries(given)
    if ids is None or (ids.dim() == 2 and ids.shape[0] > 1):
        return op.out
    flat, axis = ids.reshape(-1), ids.dim() - 1
    everything = _axis(op) is None
    first, rest = (op.args[0], op.args[1:]) if op.args else (None, ())
    if not isinstance(first, torch.Tensor):
        return op.out
    found = []
    for segment in range(segments.count):
        part = first.index_select(axis, (flat == segment).nonzero().flatten())
        value = op.func(part, *rest, **op.kwargs)
        if op.name in EXTREMES and not isinstance(value, torch.Tensor):
            value = value[0]
        found.append(value.reshape(1) if everything else value.unsqueeze(axis) if value.dim() < first.dim() else value)
    each = torch.cat(found, 0 if everything else axis)
    out = each if shape == "segments" else each.index_select(0 if everything else axis, flat.clamp(min=0))
    if everything:
        behind = max(given.dim() - axis - 1, int(shape == "column"))
        out = out.reshape(*[1] * axis, -1, *[1] * behind)
    return _like(op.out, out)


def _like(old: Any, new: torch.Tensor) -> Any:
    if isinstance(old, torch.Tensor):
        return new
    return type(old)((new, *list(old)[1:]))


def _scores(op: Op, segments: Segments) -> torch.Tensor | None:
    """The (positions, positions) mask of the segments for a softmax over the scores of all pairs, or an attention."""
    if not op.inputs:
        return None
    shape = op.inputs[0].shape
    length = segments.ids.shape[-1]
    if op.name in SOFTMAXES:
        fits = shape[-2:] == (length, length)
    else:
        fits = op.name == "scaled_dot_product_attention" and shape[-2] == length and op.inputs[1].shape[-2] == length
    if not fits or len(shape) < 2:
        return None
    ids = segments.ids if segments.ids.dim() == 2 else segments.ids[None]
    same = ids[:, :, None] == ids[:, None, :]
    while same.dim() < len(shape):
        same = same[:, None]
    return same if same.shape[0] in (1, shape[0]) else None


def _masked(op: Op, segments: Segments) -> Any:
    """The operation with what lies in other segments left out."""
    same = _scores(op, segments)
    given = op.inputs[0]
    if same is None:
        return op.out
    if same.dim() > given.dim():
        same = same[0]
    if op.name in SOFTMAXES:
        lowest = torch.finfo(given.dtype).min
        soft = given.masked_fill(~same, lowest)
        return soft.softmax(-1) if op.name == "softmax" else soft.log_softmax(-1)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    bound = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    query, key, value = (bound[n] for n in ("query", "key", "value"))
    scores = query @ key.transpose(-1, -2) * (bound.get("scale") or query.shape[-1] ** -0.5)
    mask = bound.get("attn_mask")
    if bound.get("is_causal"):
        same = same & torch.ones(scores.shape[-2:], dtype=torch.bool, device=given.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        same = same & mask
    elif mask is not None:
        scores = scores + mask
    weights = scores.masked_fill(~same, torch.finfo(scores.dtype).min).softmax(-1)
    return weights @ value
