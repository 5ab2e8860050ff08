"""Boxes that are read as (x1, y1, x2, y2): corners in order, and both sides in one format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, as_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.losses.table.lookup import Known

_PAIR = 2


def boxes(call: Call, _known: Known, name: str) -> Iterator[Judgement]:
    """One argument of boxes, judged with the call's first: what both are is known only then."""
    given = call.tensor(name)
    if given is None or given.dim() < 1 or given.shape[-1] != 4 or not given.numel():
        return
    node = call.node(name)
    if node is not None and node.history:
        yield from _predicted(call, name, given)
        return
    wrong = _unordered(given)
    if bool(wrong.any()):
        row = given.reshape(-1, 4)[wrong.reshape(-1)][0]
        yield call.judged(
            "box_format",
            f"{int(wrong.sum())} of {wrong.numel()} target boxes given to {call.name} have x2 < x1 or y2 < y1: "
            + (
                "read as centre, width and height all of them are boxes"
                if _are_sizes(given)
                else "their corners are not in order"
            ),
            measured=f"{name} {as_list(row)}, read as (x1, y1, x2, y2)",
            shown_by="the boxes of the data"
            + (": all their last two numbers are at least 0, as widths and heights are" if _are_sizes(given) else ""),
            culprit=name,
            repair="box_convert(boxes, in_fmt='cxcywh', out_fmt='xyxy'); in_fmt='xywh' if the first two are the corner"
            if _are_sizes(given)
            else "order the corners: x1 <= x2 and y1 <= y2",
        )


def _predicted(call: Call, name: str, given: torch.Tensor) -> Iterator[Judgement]:
    """Predicted boxes that a distance compares with targets as centres and sizes, and this call as corners."""
    other = next((n for n, v in call.given.items() if n != name and _is_like(v, given)), None)
    target = None if other is None else call.tensor(other)
    value = call.given[name]
    for compared in call.compared:
        if compared.output == id(value) and target is not None and compared.target.shape == target.shape:
            for fmt, corners in _as_corners(compared.target):
                if _equal(corners, target) and not _equal(compared.target, target):
                    yield call.judged(
                        "box_format",
                        f"{call.name} compares predicted boxes with corners, and a distance compares the same ones "
                        f"with {fmt}: they cannot be both",
                        measured=f"targets {as_list(target.reshape(-1, 4)[0])} here, "
                        f"{as_list(compared.target.reshape(-1, 4)[0])} at {compared.place.file}:{compared.place.line}",
                        shown_by=f"the targets of the distance, converted from {fmt} to corners, are the targets given "
                        "here",
                        culprit=name,
                        repair=f"convert the predictions as the targets are: box_convert(boxes, in_fmt='{fmt}', "
                        "out_fmt='xyxy')",
                    )
                    return
    wrong = _unordered(given)
    if bool(wrong.any()):
        yield call.judged(
            "box_format",
            f"{int(wrong.sum())} of {wrong.numel()} predicted boxes given to {call.name} have x2 < x1 or y2 < y1: it "
            "reads them as corners",
            level="advice",
            in_every_call=True,
            measured=f"{name} {as_list(given.reshape(-1, 4)[wrong.reshape(-1)][0])}",
            shown_by="the values of every call; nothing on the way from the last layer orders the corners",
            culprit=name,
            repair="if the head predicts (cx, cy, w, h): box_convert(boxes, in_fmt='cxcywh', out_fmt='xyxy')",
        )


def compared_with_all(call: Call) -> Iterator[Judgement]:
    """A table of all boxes with all, whose every entry counts alike: each prediction is pulled to every target."""
    weights = call.weights
    if weights is None or weights.dim() != _PAIR or weights.shape[0] != weights.shape[1] or len(weights) < _PAIR:
        return
    flat = weights.detach().double().reshape(-1)
    if bool((flat != 0).all()) and bool((flat == flat[0]).all()):
        n = len(weights)
        yield call.judged(
            "broadcast",
            f"{call.name} compares every box with every other, and all {n * n} results count alike: each prediction is "
            "pulled to all targets",
            measured=f"{n * n} results where {n} are meant",
            shown_by="the gradient of what is backpropagated with respect to each of them is the same",
            repair="torch.diag(...) of the table, or the loss of matched pairs (generalized_box_iou_loss)",
        )


def _unordered(given: torch.Tensor) -> torch.Tensor:
    return (given[..., 2] < given[..., 0]) | (given[..., 3] < given[..., 1])


def _are_sizes(given: torch.Tensor) -> bool:
    return bool((given[..., 2:] >= 0).all())


def _is_like(value: object, given: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == given.shape


def _as_corners(given: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same boxes as corners, if they are in this format."""
    at, size = given[..., :2], given[..., 2:]
    yield "cxcywh", torch.cat([at - size / 2, at + size / 2], -1)
    yield "xywh", torch.cat([at, at + size], -1)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the rounding of a sum and a half."""
    scale = 8 * torch.finfo(right.dtype).eps * (1 + right.detach().abs().max()) if right.is_floating_point() else 0.0
    return bool(((left.double() - right.double()).abs() <= scale).all())
