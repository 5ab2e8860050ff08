"""What is known of the positions of a batch: token ids, and which positions are padding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.batches.padding import Ids, Proof, read_padding
from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call
from pytest_trainloop.tracing.provenance_queries import Layout, layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.loop import Padding
    from pytest_trainloop.tracing.provenance import Node

FEWEST = 24
"""Positions that must be compared before a shift is named."""


@dataclass(slots=True)
class Tokens:
    """``batch`` is the batch at hand, ``embedded`` what embeddings looked up since the last step: the ids, and what
    came out."""

    declared: Padding | None = None
    batch: Any = None
    embedded: list[tuple[Ids, torch.Tensor]] = field(default_factory=list)

    def padded(self, shape: tuple[int, int]) -> torch.Tensor | None:
        """Which of (rows, positions) are padding; None where that is not proven. What stands in labels is no proof:
        labels of padded positions are what is judged."""
        inputs = [ids for ids, _ in self.embedded if tuple(ids.ids.shape) == shape]
        found = read_padding(self.batch, at_least=Proof.INPUTS, shape=shape, declared=self.declared, inputs=inputs)
        return None if found is None else found.mask


def positions(node: Node | None, call: Call) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]] | None:
    """The row and the position in the batch of each entry of the targets, and the shape of the last layer's rows."""
    target = call.tensor("target")
    found = layout(node)
    if found is None or target is None or len(found.leading) != 2 or len(found.layer.shape) != 3:
        return None
    if found.position.dim() != target.dim() + 1 or found.position.select(1, 0).shape != target.shape:
        return None
    row, position = found.coordinates(found.position.select(1, 0).to(target.device))
    return row, position, (found.leading[0], found.leading[1])


def padding(call: Call) -> Iterator[Breach]:
    """Padded positions that count in a loss over classes."""
    tokens, target = call.tokens, call.tensor("target")
    at = positions(call.node("input"), call)
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
        yield _real(call, ignored, real, bool((target[inside] == ignored).any()))


def _between_padding(padded: torch.Tensor) -> torch.Tensor:
    """Padding that is followed by no real token: what comes first on the left is asked for by the last of it."""
    return padded & torch.cat([padded[:, 1:], padded[:, -1:]], 1)


def padded_entries(call: Call) -> Iterator[Breach]:
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
    """Whether rows and positions lie as in the layer's output."""
    if len(at.leading) != 2:
        return True
    rows, places = at.coordinates(at.position)
    return bool((rows.diff(dim=0) >= 0).all()) and bool((places.diff(dim=1) >= 0).all())


def _counted(call: Call, inside: torch.Tensor, counted: torch.Tensor, ignored: int) -> Iterator[Breach]:
    target = call.tensor("target")
    kept = call.counts()
    if kept is not None and kept.shape == counted.shape:
        counted = counted & kept
    wrong = inside & counted
    if target is None or not bool((counted & ~inside).any()):
        return
    if bool(wrong.any()):
        values = torch.unique(target[wrong])
        if values.numel() == 1:  # what differs from place to place may be meant
            yield _padding(call, float(values[0]), ignored, wrong, counted)
    elif kept is not None and call.weights is not None:
        each = call.weights.detach()[counted].double()
        if bool(((each * counted.numel() - 1).abs() <= 1e-4).all()):
            yield _mean_of_all(call, counted)


def _mean_of_all(call: Call, counted: torch.Tensor) -> Breach:
    return Breach(
        cause="padding_counted",
        level="advice",
        summary=f"the losses of {int(counted.sum())} real positions are divided by all {counted.numel()} positions",
        measured=f"{1 - float(counted.double().mean()):.0%} of the positions in the mean are padding, with loss 0",
        shown_by="the gradient of what is backpropagated at each of them is 1 over the number of all",
        culprit=call.name,
        where=str(call.place),
        repair="divide by the number of real positions: (loss * mask).sum() / mask.sum()",
    )


def _real(call: Call, ignored: int, real: torch.Tensor, shared: bool) -> Breach:
    return Breach(
        cause="real_class_ignored",
        level="advice",
        summary=f"{int(real.sum())} positions that are no padding have the label {ignored}, which {call.name} ignores"
        + (": padding and a real class share it" if shared else ""),
        measured=f"{float(real.double().mean()):.0%} of the positions",
        shown_by="the padding of the input against the labels",
        culprit=f"ignore_index={ignored}",
        where=str(call.place),
        repair="nothing, if that class is not to be learned; else label padding -100",
    )


def _padding(call: Call, label: float, ignored: int, wrong: torch.Tensor, counted: torch.Tensor) -> Breach:
    share = float(wrong.sum()) / float(counted.sum())
    mismatch, classes = ignored != -100, "ignore_index" in call.given
    each = _without(call, wrong, counted)
    return Breach(
        cause="ignore_index_mismatch" if mismatch else "padding_counted",
        summary=f"{share:.0%} of the positions that count in {call.name} are padding"
        + (f": ignore_index is {ignored}, and padded positions are labelled {label:g}" if mismatch else ""),
        measured=f"{int(wrong.sum())} of {int(counted.sum())} positions{each}",
        shown_by=f"all of them hold the padding in the model's input, and {label:g} as label",
        culprit=f"ignore_index={ignored}" if classes else call.name,
        where=str(call.place),
        repair="take padded positions out before the mean"
        if not classes
        else f"label padded positions {ignored}"
        if not mismatch
        else f"pass ignore_index={label:g}, or label padded positions {ignored}",
    )


def _without(call: Call, wrong: torch.Tensor, counted: torch.Tensor) -> str:
    """The loss with and without the padding, where it can be had from the call."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or call.name != "cross_entropy":
        return ""
    each = torch.nn.functional.cross_entropy(given.double(), target, ignore_index=-100 if int(target.min()) < 0 else -1,
                                             reduction="none")  # fmt: skip
    with_it, without = each[counted].mean(), each[counted & ~wrong].mean()
    return f"; loss {float(with_it):.4g} with them, {float(without):.4g} without"


def shift(call: Call) -> Iterator[Breach]:
    """Labels of a causal model that are the inputs of two positions on, or of the same position."""
    tokens, target = call.tokens, call.tensor("target")
    at = positions(call.node("input"), call)
    if tokens is None or target is None or at is None or target.is_floating_point():
        return
    row, position, shape = at
    kept = target != call.given.get("ignore_index", -100)
    known = call.counts()
    if known is not None and known.shape == kept.shape:
        kept = kept & known
    for (ids, _), out in tokens.embedded:
        if tuple(ids.shape) != shape or torch.unique(ids).numel() < 4:
            continue
        found = [s for s in (-1, 0, 1, 2, 3) if _agrees(ids, target, row, position, kept, s)]
        if len(found) == 1:
            yield from _shifted(call, found[0], out, shape, position)
            return


def _agrees(
    ids: torch.Tensor, target: torch.Tensor, row: torch.Tensor, position: torch.Tensor, kept: torch.Tensor, by: int
) -> bool:
    """Whether the labels are the ids so many positions on, wherever both are there."""
    there = kept & (position + by >= 0) & (position + by < ids.shape[1])
    if int(there.sum()) < FEWEST:
        return False
    same = ids[row[there], position[there] + by] == target[there]
    return bool(same.all())


def _shifted(
    call: Call, by: int, out: torch.Tensor, shape: tuple[int, int], position: torch.Tensor
) -> Iterator[Breach]:
    last = _last_input(call, out, shape, position)
    if last is None or by - last == 1 or _in_one_move(call.node("target")):
        return
    ahead = by - last
    cause = "shifted_twice" if ahead > 1 else "not_shifted"
    summary = {
        0: "labels are not shifted: a causal model is asked for the token that it is given",
        -1: "labels are shifted the wrong way: a causal model is asked for the token before",
        2: "labels are shifted twice: the output of a causal model is compared with the token two on",
    }.get(ahead, f"labels are shifted by {ahead}: the output of a causal model is compared with the token there")
    yield Breach(
        cause=cause,
        summary=f"{summary} ({call.name})",
        measured=f"every label is the id {ahead} position{'s' if abs(ahead) != 1 else ''} on, and none the next",
        shown_by="the labels against the ids that the embedding looked up; no output depends on later inputs",
        culprit="labels",
        where=str(call.place),
        repair="compare the output at t with the token at t + 1, shifting once: in the data, or in the loss",
        always=True,
    )


def _in_one_move(node: Node | None) -> bool:
    """Whether the labels were moved on by two or more at once, which is meant."""
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


def _last_input(call: Call, out: torch.Tensor, shape: tuple[int, int], position: torch.Tensor) -> int | None:
    """The last position, counted from an output's own, whose input that output depends on: by the gradient of outputs
    in the middle, exactly zero beyond. None for a model that sees later inputs, or
    no earlier ones."""
    given = call.given.get("input")
    if not isinstance(given, torch.Tensor) or not out.requires_grad or out.shape[:2] != shape:
        return None
    middle = shape[1] // 2
    chosen = position == middle
    if given.dim() < 2 or not bool(chosen.any()):
        return None
    with torch.enable_grad():
        scores = given.movedim(1, -1)[chosen]
        total = (scores.double() * torch.linspace(0.5, 1.5, scores.shape[-1], dtype=torch.float64)).sum()
        try:
            (slope,) = torch.autograd.grad(total, out, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a re-entrant checkpoint refuses it
            return None
    if slope is None:
        return None
    felt = (slope != 0).flatten(2).any(2).any(0).nonzero().flatten()
    causal = felt.numel() > 1 and int(felt.min()) < middle >= int(felt.max())
    return int(felt.max()) - middle if causal else None
