"""Labels of token positions: padding that counts, classes that are ignored, shifts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, judges
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES
from pytest_trainloop.tracing.provenance_queries import Layout, layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.provenance import Node

FEWEST = 24
"""Positions that must be compared before a shift is reported."""


class TargetPositions(NamedTuple):
    """For each entry of the targets, where it lies in the batch."""

    row: torch.Tensor
    position: torch.Tensor
    shape: tuple[int, int]
    """(rows, positions) of the last layer's output."""


def target_positions(call: Call) -> TargetPositions | None:
    target, found = call.tensor("target"), layout(call.node("input"))
    if found is None or target is None or len(found.leading) != 2 or len(found.layer.shape) != 3:
        return None
    if found.position.dim() != target.dim() + 1 or found.position.select(1, 0).shape != target.shape:
        return None
    row, position = found.coordinates(found.position.select(1, 0).to(target.device))
    return TargetPositions(row, position, (found.leading[0], found.leading[1]))


@judges("cross_entropy", "nll_loss")
def padding(call: Call) -> Iterator[Judgement]:
    """Padded positions that count in a loss over classes."""
    tokens, target, at = call.tokens, call.tensor("target"), target_positions(call)
    if tokens is None or target is None or at is None or target.is_floating_point():
        return
    row, position, shape = at
    padded = tokens.padded(shape)
    ignored = call.given.get("ignore_index", -100)
    if padded is None:
        return
    inside = _between_padding(padded).to(target.device)[row, position]
    yield from _counted(call, inside, target != ignored, ignored)
    real = ~padded.to(target.device)[row, position] & (target == ignored)
    if ignored >= 0 and bool(real.any()):
        shared = ": padding and a real class share it" if bool((target[inside] == ignored).any()) else ""
        yield call.judged(
            "real_class_ignored",
            f"{int(real.sum())} positions that are not padding have the label {ignored}, which {call.name} ignores"
            f"{shared}",
            level="advice",
            measured=f"{float(real.double().mean()):.0%} of the positions",
            shown_by="the padding of the input against the labels",
            culprit=f"ignore_index={ignored}",
        )


def _between_padding(padded: torch.Tensor) -> torch.Tensor:
    """Padding that no real token follows: the last position of padding on the left may be asked for the first token."""
    return padded & torch.cat([padded[:, 1:], padded[:, -1:]], 1)


@judges(*DISTANCE_LOSSES, "binary_cross_entropy_with_logits")
def padded_entries(call: Call) -> Iterator[Judgement]:
    """Padded positions that count in a loss that compares entries: (rows, positions) or (rows, positions, features)."""
    given, target, tokens = call.tensor("input"), call.tensor("target"), call.tokens
    if given is None or target is None or tokens is None or given.shape != target.shape or given.dim() not in (2, 3):
        return
    padded = tokens.padded((given.shape[0], given.shape[1]))
    at = layout(call.node("input"))
    if padded is None or (at is not None and not _in_order(at)):
        return
    inside = _between_padding(padded).to(target.device)
    if given.dim() == 3:
        inside = inside[..., None].expand(given.shape)
    kept = torch.ones_like(inside)
    weight = call.tensor("weight")
    if weight is not None and weight.shape == given.shape:
        kept = weight != 0
    yield from _counted(call, inside, kept, -100)


def _in_order(at: Layout) -> bool:
    """Whether rows and positions are in the order of the layer's output."""
    if len(at.leading) != 2:
        return True
    rows, positions = at.coordinates(at.position)
    return bool((rows.diff(dim=0) >= 0).all()) and bool((positions.diff(dim=1) >= 0).all())


def _counted(call: Call, inside: torch.Tensor, counted: torch.Tensor, ignored: int) -> Iterator[Judgement]:
    target = call.tensor("target")
    kept = call.counted()
    if kept is not None and kept.shape == counted.shape:
        counted = counted & kept
    wrong = inside & counted
    if target is None or not bool((counted & ~inside).any()):
        return
    if bool(wrong.any()):
        values = torch.unique(target[wrong])
        if values.numel() == 1:  # labels that differ may be meant
            yield _padding(call, float(values[0]), ignored, wrong, counted)
    elif kept is not None and call.weights is not None:
        each = call.weights.detach()[counted].double()
        if bool(((each * counted.numel() - 1).abs() <= 1e-4).all()):
            yield call.judged(
                "padding_counted",
                f"the losses of {int(counted.sum())} real positions are divided by all {counted.numel()} positions",
                level="advice",
                measured=f"{1 - float(counted.double().mean()):.0%} of the mean's positions are padding, with loss 0",
                shown_by="the gradient of what is backpropagated at each of them is 1 over the number of all",
                repair="divide by the number of real positions: (loss * mask).sum() / mask.sum()",
            )


def _padding(call: Call, label: float, ignored: int, wrong: torch.Tensor, counted: torch.Tensor) -> Judgement:
    share = float(wrong.sum()) / float(counted.sum())
    mismatch, over_classes = ignored != -100, "ignore_index" in call.given
    if mismatch:
        repair = f"pass ignore_index={label:g}, or label padded positions {ignored}"
    else:
        repair = f"label padded positions {ignored}" if over_classes else "leave padded positions out of the mean"
    return call.judged(
        "ignore_index_mismatch" if mismatch else "padding_counted",
        f"{share:.0%} of the positions that count in {call.name} are padding"
        + (f": ignore_index is {ignored}, and padded positions are labelled {label:g}" if mismatch else ""),
        measured=f"{int(wrong.sum())} of {int(counted.sum())} positions{_loss_without(call, wrong, counted)}",
        shown_by=f"all of them hold the padding in the model's input, and {label:g} as label",
        culprit=f"ignore_index={ignored}" if over_classes else "",
        repair=repair,
    )


def _loss_without(call: Call, wrong: torch.Tensor, counted: torch.Tensor) -> str:
    """The loss with and without the padding, if it can be computed from the call."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or call.name != "cross_entropy":
        return ""
    ignored = -100 if int(target.min()) < 0 else -1
    each = F.cross_entropy(given.double(), target, ignore_index=ignored, reduction="none")
    return f"; loss {float(each[counted].mean()):.4g} with them, {float(each[counted & ~wrong].mean()):.4g} without"


@judges("cross_entropy", "nll_loss")
def shift(call: Call) -> Iterator[Judgement]:
    """Labels of a causal model that are its inputs two positions ahead, or at the same position."""
    tokens, target, at = call.tokens, call.tensor("target"), target_positions(call)
    if tokens is None or target is None or at is None or target.is_floating_point():
        return
    kept = target != call.given.get("ignore_index", -100)
    counted = call.counted()
    if counted is not None and counted.shape == kept.shape:
        kept = kept & counted
    for (ids, _), out in tokens.embedded:
        if tuple(ids.shape) != at.shape or torch.unique(ids).numel() < 4:
            continue
        found = [by for by in (-1, 0, 1, 2, 3) if _agrees(ids, target, at, kept, by)]
        if len(found) == 1:
            yield from _shifted(call, found[0], out, at)
            return


def _agrees(ids: torch.Tensor, target: torch.Tensor, at: TargetPositions, kept: torch.Tensor, by: int) -> bool:
    """Whether the labels are the ids this many positions ahead, wherever there are both."""
    inside = kept & (at.position + by >= 0) & (at.position + by < ids.shape[1])
    if int(inside.sum()) < FEWEST:
        return False
    return bool((ids[at.row[inside], at.position[inside] + by] == target[inside]).all())


def _shifted(call: Call, by: int, embedded: torch.Tensor, at: TargetPositions) -> Iterator[Judgement]:
    last = _last_input(call, embedded, at)
    if last is None or by - last == 1 or _shifted_at_once(call.node("target")):
        return
    ahead = by - last
    summary = {
        0: "labels are not shifted: a causal model is asked for the token that it is given",
        -1: "labels are shifted the wrong way: a causal model is asked for the previous token",
        2: "labels are shifted twice: the output of a causal model is compared with the token two positions ahead",
    }.get(ahead, f"labels are shifted by {ahead}: the output of a causal model is compared with the token there")
    yield call.judged(
        "shifted_twice" if ahead > 1 else "not_shifted",
        f"{summary} ({call.name})",
        in_every_call=True,
        measured=f"every label is the id {ahead} position{'s' if abs(ahead) != 1 else ''} ahead, and none the next",
        shown_by="the labels against the ids that the embedding looked up; no output depends on later inputs",
        culprit="labels",
    )


def _shifted_at_once(node: Node | None) -> bool:
    """Whether one operation shifted the labels by two or more positions, which is meant."""
    for _ in range(12):
        if node is None or not node.moves or not node.parents:
            return False
        parent = node.parents[0]
        if node.op == "__getitem__" and node.replay is not None and len(parent.shape) == 2:
            first = node.replay(torch.arange(math.prod(parent.shape)).reshape(parent.shape)).flatten()[:1]
            if first.numel() and int(first) % parent.shape[1] >= 2:
                return True
        node = parent
    return False


def _last_input(call: Call, embedded: torch.Tensor, at: TargetPositions) -> int | None:
    """The last position whose input an output depends on, relative to the output's own position.

    By the gradient of outputs in the middle, which is exactly 0 beyond. None for a model that sees later inputs, or no
    earlier ones.
    """
    given = call.given.get("input")
    if not isinstance(given, torch.Tensor) or not embedded.requires_grad or embedded.shape[:2] != at.shape:
        return None
    middle = at.shape[1] // 2
    chosen = at.position == middle
    if given.dim() < 2 or not bool(chosen.any()):
        return None
    with torch.enable_grad():
        scores = given.movedim(1, -1)[chosen]
        total = (scores.double() * torch.linspace(0.5, 1.5, scores.shape[-1], dtype=torch.float64)).sum()
        try:
            (slope,) = torch.autograd.grad(total, embedded, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a re-entrant checkpoint refuses it
            return None
    if slope is None:
        return None
    reached = (slope != 0).flatten(2).any(2).any(0).nonzero().flatten()
    causal = reached.numel() > 1 and int(reached.min()) < middle >= int(reached.max())
    return int(reached.max()) - middle if causal else None
