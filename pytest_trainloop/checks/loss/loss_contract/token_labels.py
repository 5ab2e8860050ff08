"""Labels of token positions: padding that counts, and classes that are ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement, judges
from pytest_trainloop.checks.loss.loss_contract.label_rows import TargetPositions, misplaced, of_own_row
from pytest_trainloop.checks.loss.loss_contract.reached import trained_positions
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES
from pytest_trainloop.tracing.provenance_queries import Layout, layout

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    padded = tokens.padded(shape, call.node("input"))
    ignored = call.given.get("ignore_index", -100)
    if padded is None:
        return
    inside = _between_padding(padded).to(target.device)[row, position]
    yield from _counted(call, at, padded, inside, target != ignored, ignored)
    real = ~padded.to(target.device)[row, position] & (target == ignored)
    if ignored >= 0 and bool(real.any()) and not tokens.never_real(ignored, padded, _classes(call)):
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


@judges("cross_entropy", "nll_loss")
def one_of_two_classes(call: Call) -> Iterator[Judgement]:
    """A label that is ignored, and is one of two classes: what counts is the other one alone."""
    target, ignored = call.tensor("target"), call.given.get("ignore_index", -100)
    if target is None or target.is_floating_point() or _classes(call) != 2 or ignored not in (0, 1):
        return
    left_out = target == ignored
    if bool(left_out.any()) and bool((target == 1 - ignored).any()) and bool(((target == 0) | (target == 1)).all()):
        yield call.judged(
            "real_class_ignored",
            f"{call.name} over 2 classes ignores label {ignored}: only label {1 - ignored} trains",
            level="advice",
            measured=f"{int(left_out.sum())} of {target.numel()} labels are {ignored}",
            shown_by="the scores have two classes, and all labels are one of these",
            culprit=f"ignore_index={ignored}",
            repair="leave ignore_index out here, or use a criterion of its own for these labels",
        )


def _classes(call: Call) -> int:
    scores = call.tensor("input")
    return 0 if scores is None or not scores.dim() else int(scores.shape[1 if scores.dim() > 1 else 0])


def _between_padding(padded: torch.Tensor) -> torch.Tensor:
    """Padding that no real token follows: the last position of padding on the left may be asked for the first token."""
    return padded & torch.cat([padded[:, 1:], padded[:, -1:]], 1)


@judges(*DISTANCE_LOSSES, "binary_cross_entropy_with_logits")
def padded_entries(call: Call) -> Iterator[Judgement]:
    """Padded positions that count in a loss that compares entries: (rows, positions) or (rows, positions, features)."""
    given, target, tokens = call.tensor("input"), call.tensor("target"), call.tokens
    if given is None or target is None or tokens is None or given.shape != target.shape or given.dim() not in (2, 3):
        return
    padded = tokens.padded((given.shape[0], given.shape[1]), call.node("input"))
    at = layout(call.node("input"))
    if padded is None or (at is not None and not _in_order(at)):
        return
    rows, positions = (torch.arange(size, device=target.device) for size in padded.shape)
    features = (1,) * (given.dim() - 2)
    entries = TargetPositions(
        rows.view(-1, 1, *features).expand(given.shape),
        positions.view(1, -1, *features).expand(given.shape),
        (given.shape[0], given.shape[1]),
    )
    inside = _between_padding(padded).to(target.device)[entries.row, entries.position]
    kept = torch.ones_like(inside)
    weight = call.tensor("weight")
    if weight is not None and weight.shape == given.shape:
        kept = weight != 0
    yield from _counted(call, entries, padded, inside, kept, -100)


def _in_order(at: Layout) -> bool:
    """Whether rows and positions are in the order of the layer's output."""
    if len(at.leading) != 2:
        return True
    rows, positions = at.coordinates(at.position)
    return bool((rows.diff(dim=0) >= 0).all()) and bool((positions.diff(dim=1) >= 0).all())


def _counted(
    call: Call, at: TargetPositions, padded: torch.Tensor, inside: torch.Tensor, taken: torch.Tensor, ignored: int
) -> Iterator[Judgement]:
    """``inside``: the entries that are padding; ``taken``: those that the call does not leave out."""
    target, kept = call.tensor("target"), call.counted()
    if kept is not None and kept.shape == taken.shape:
        taken = taken & kept
    trains = trained_positions(call, at.shape) if bool(inside.any()) else None
    # whatever is predicted at padding that is masked before the call, no weight moves by it
    counted = taken if trains is None else taken & (trains.to(taken.device)[at.row, at.position] | ~inside)
    wrong = inside & counted
    if target is None or not bool((counted & ~inside).any()):
        return
    if bool(wrong.any()):
        values = torch.unique(target[wrong])
        declared = call.tokens is not None and call.tokens.declared is not None
        in_part = values.numel() > 1 or not torch.equal(wrong, inside)
        own = of_own_row(call, at, counted & ~wrong) if in_part else True
        if not own and (found := misplaced(call, at, padded, taken, declared=declared)) is not None:
            yield found
        elif values.numel() == 1 or declared:  # labels that differ may be meant
            label = float(values[0]) if values.numel() == 1 else None
            yield _padding(call, label, ignored, wrong, counted, own=own)
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


def _padding(
    call: Call, label: float | None, ignored: int, wrong: torch.Tensor, counted: torch.Tensor, *, own: bool
) -> Judgement:
    """``label`` is that of all padded positions; None where these have several, and the padding is declared. ``own``:
    nothing speaks against these labels being those of their rows."""
    share = float(wrong.sum()) / float(counted.sum())
    mismatch, over_classes = label is not None and ignored != -100, "ignore_index" in call.given
    target, do_not = call.tensor("target"), ""
    alike = int((target[counted & ~wrong] == label).sum()) if target is not None and label is not None else 0
    labels = "labels of several values" if label is None else f"{label:g} as label"
    filled = f"labels.masked_fill({_padded_in_code(call)}, {ignored})"
    if mismatch and alike:
        repair = f"label padded positions {ignored}: {filled}"
        do_not = f"set ignore_index={label:g}: {alike} real positions have label {label:g} as well"
    elif mismatch:
        repair = f"ignore_index={label:g}, or label padded positions {ignored}: {filled}"
    elif over_classes:
        repair = (
            f"labels = {filled}\nlabel {ignored} also what else the model is not to write: the prompt, in fine-tuning"
        )
    else:
        repair = "loss = (each * mask).sum() / mask.sum(), with mask 0 at padded positions"
    if not own:
        repair = (
            "compare one row of the batch with its example: are these its labels, and where are those of its last "
            f"tokens?\nmask them only if they are: {repair}"
        )
    return call.judged(
        "ignore_index_mismatch" if mismatch else "padding_counted",
        f"{share:.0%} of the positions that count in {call.name} are padding"
        + (f": ignore_index is {ignored}, and padded positions are labelled {label:g}" if mismatch else ""),
        measured=f"{int(wrong.sum())} of {int(counted.sum())} positions{_loss_without(call, wrong, counted)}",
        shown_by=f"all of them hold the padding in the model's input, and {labels}",
        culprit=f"ignore_index={ignored}" if over_classes else "",
        repair=repair,
        do_not=do_not,
    )


def _padded_in_code(call: Call) -> str:
    """What says of the labels which are padding, in the batch's own names."""
    at = target_positions(call)
    return "is_padding" if at is None or call.tokens is None else call.tokens.padded_in_code(at.shape)


def _loss_without(call: Call, wrong: torch.Tensor, counted: torch.Tensor) -> str:
    """The loss with and without the padding, if it can be computed from the call."""
    given, target = call.tensor("input"), call.tensor("target")
    if given is None or target is None or call.name != "cross_entropy":
        return ""
    ignored = -100 if int(target.min()) < 0 else -1
    each = F.cross_entropy(given.double(), target, ignore_index=ignored, reduction="none")
    return f"; loss {float(each[counted].mean()):.4g} with them, {float(each[counted & ~wrong].mean()):.4g} without"
