"""Padded positions that count in a loss, and labels that are those of other rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.padding import Ids, Proof, read_padding
from pytest_trainloop.instruments.batches.values import binary, trailing
from pytest_trainloop.instruments.tracing.statements import used_next
from pytest_trainloop.instruments.tracing.tape_queries import layout, made_of
from pytest_trainloop.recording.torch_names import CLASS_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import LossCall, Step
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.batches.padding import PaddingMask
    from pytest_trainloop.instruments.tracing.tape_queries import Layout

MOST_VALUES = 20_000
"""Calls before the scores in which the model's inputs are looked for."""
FARTHEST = 12
"""Operations before the loss function that are gone back through: masks, casts, reshapes, a softmax."""


LEAST_COUNTS = 3
"""Different numbers of places that count, of several rows."""


class Entries(NamedTuple):
    """For each entry of the targets, where it lies in the batch."""

    row: torch.Tensor
    position: torch.Tensor
    shape: tuple[int, int]
    """(rows, positions) of the last layer's output."""


def padded_positions(
    step: Step, shape: tuple[int, int], read: set[tuple[int, ...]] | None = None
) -> PaddingMask | None:
    """Which of (rows, positions) are padding; None where that is not proven. ``read`` are the shapes of what the scores
    were computed of.

    Labels are no proof: those of padded positions are what is judged. Nor are boxes of which some are filled up: slots
    that no input of the scores has may all be asked for a class.
    """
    inputs = [Ids(e.ids, e.pad) for e in step.embedded if tuple(e.ids.shape) == shape]
    return read_padding(
        step.batch, at_least=Proof.INPUTS, shape=shape, declared=step.declared, inputs=inputs, read=read
    )


def inputs_of(call: LossCall, scores: str = "input") -> set[tuple[int, ...]]:
    """The shapes of what the scores, an argument of this name, were computed of."""
    return {tuple(v.shape) for v in made_of(call.values[scores], MOST_VALUES) if not v.parents and not v.parameter}


def padding(call: LossCall) -> Iterator[Finding]:
    """Padded positions that count: in a loss over classes, or in one that compares (rows, positions[, features])."""
    given, target = call.tensor("input"), call.tensor("target")
    of_classes = call.name in CLASS_LOSSES
    at = of_labels(call) if of_classes else _of_entries(call)
    if given is None or target is None or at is None:
        return
    found = padded_positions(call.step, at.shape, inputs_of(call))
    if found is None:
        yield from _between_others(call, at, call.given.get("ignore_index", -100)) if of_classes else _masked_mean(call)
        return
    ignored = call.given.get("ignore_index", -100) if of_classes else -100
    mask = found.mask.to(target.device)
    # the last position of padding on the left may be asked for the first token
    inside = (mask & torch.cat([mask[:, 1:], mask[:, -1:]], 1))[at.row, at.position]
    taken = (target != ignored if of_classes else torch.ones_like(inside)) & call.counted(inside)
    yield from _counted(call, at, found, inside, taken, ignored)
    real = ~mask[at.row, at.position] & (target == ignored) if of_classes else inside.new_zeros(())
    if ignored >= 0 and bool(real.any()) and not _never_real(call.step, ignored, mask, _classes(given)):
        shared, part = bool((target[inside] == ignored).any()), float(real.double().mean())
        facts = {"count": int(real.sum()), "ignored": ignored, "part": part, "shared": shared}
        yield call.finds("real_class_ignored", **facts, culprit=f"ignore_index={ignored}", level="advice")


def one_of_two_classes(call: LossCall) -> Iterator[Finding]:
    """A label that is ignored, and is one of two classes: what counts is the other one alone."""
    given, target, ignored = call.tensor("input"), call.tensor("target"), call.given.get("ignore_index", -100)
    if given is None or target is None or target.is_floating_point() or _classes(given) != 2 or ignored not in (0, 1):
        return
    left_out = target == ignored
    if bool(left_out.any()) and bool((target == 1 - ignored).any()) and bool(((target == 0) | (target == 1)).all()):
        facts = {"ignored": ignored, "other": 1 - ignored, "count": int(left_out.sum()), "all": target.numel()}
        # another loss may train the scores of unlabelled rows (odd: positives_and_unlabelled_rows)
        alone = _raises_one_class(call, left_out)
        level = "fault" if alone else "advice"
        yield call.finds(
            "real_class_ignored", "binary", **facts, alone=alone, culprit=f"ignore_index={ignored}", level=level
        )


def _raises_one_class(call: LossCall, left_out: torch.Tensor) -> bool:
    """Whether all that the scores are used for gives none of these rows a gradient: then every step raises the score of
    the one other class, and the best answer is that class, whatever the input."""
    slope = call.arrived
    if slope is None or slope.dim() < 2 or slope.movedim(1, -1).shape[:-1] != left_out.shape:
        return False
    return not bool(slope.movedim(1, -1)[left_out.to(slope.device)].any()) and bool(slope.any())


def _between_others(call: LossCall, at: Entries, ignored: int) -> Iterator[Finding]:
    """A label that is ignored stands between others in a row, and is read as an input: a token as any other."""
    target = call.given["target"].detach()
    pads = {e.pad for e in call.embedded if tuple(e.ids.shape) == at.shape}
    pads |= {call.step.declared.pad_id if call.step.declared is not None else None}
    if ignored < 0 or ignored in pads or target.is_floating_point():
        return
    counts = torch.zeros(at.shape, dtype=torch.int64)
    counts[at.row.cpu(), at.position.cpu()] = (target != ignored).cpu().long()
    inner = (counts == 0) & (counts.cumsum(1) > 0) & (counts.flip(1).cumsum(1).flip(1) > 0)
    left_out = inner.to(target.device)[at.row, at.position] & (target == ignored)
    if bool(left_out.any()) and _of_own_row(call, at, left_out):
        part, culprit = float(left_out.double().mean()), f"ignore_index={ignored}"
        facts = {"count": int(left_out.sum()), "ignored": ignored, "part": part, "shared": False}
        yield call.finds("real_class_ignored", "between", **facts, culprit=culprit, level="advice")


def _masked_mean(call: LossCall) -> Iterator[Finding]:
    """A mean that counts what a mask of the batch has multiplied by 0: the fewer entries a batch has, the less it
    trains. Where all rows have as many, it is a constant factor."""
    weights = call.weights
    if not call.one_each or weights is None or weights.dim() < 2:
        return
    kept = weights.detach() != 0
    same = (weights.detach()[kept].double() * kept.numel() - 1).abs() <= 1e-4
    positions = kept.flatten(2).any(-1) if kept.dim() > 2 else kept
    if bool(kept.all()) or not bool(same.all()) or len(set(positions.sum(1).tolist())) < 2:
        return
    for path, tensor in nested.paths(call.step.batch):
        if tensor.shape != positions.shape or tensor.is_complex() or not binary(tensor):
            continue
        mask = tensor.to(positions.device) != 0
        if torch.equal(mask, positions) or torch.equal(~mask, positions):
            facts: dict[str, Any] = {
                "count": int(kept.sum()),
                "all": kept.numel(),
                "part": 1 - float(kept.double().mean()),
            }
            change = used_next(str(call.place), of_losses=True)
            yield call.finds(
                "padding_counted", "mean", **facts, change=change, culprit=nested.shown(path), level="advice"
            )
            return


def divided_by_the_others(call: LossCall) -> Iterator[Finding]:
    """Rows of which each weighs what counts by 1 over the number of places that do not count: one mask is inverted."""
    if not call.one_each or call.weights is None or call.weights.dim() < 2:
        return
    weights = call.weights.detach().double().abs()
    each = weights.flatten(2).amax(-1) if weights.dim() > 2 else weights
    kept, places = each != 0, each.shape[1]
    even = ((each == each.amax(1, keepdim=True)) | ~kept).all(1)
    counts = kept.sum(1)
    rows = (even & (counts > 0) & (counts < places)).nonzero().flatten()
    number, weight = counts[rows], each[rows].amax(1)
    if len(set(number.tolist())) < LEAST_COUNTS:
        return
    by_others = weight * (places - number)
    if bool(((by_others / by_others[0] - 1).abs() <= 1e-5).all()):
        facts = {"kept": int(number[0]), "places": places, "others": places - int(number[0]), "rows": len(rows)}
        change = used_next(str(call.place), of_losses=True)
        yield call.finds("divided_by_the_others", **facts, row=int(rows[0]), change=change)


def of_labels(call: LossCall) -> Entries | None:
    """The positions of class indices, by the layer that gave the scores."""
    target, at = call.tensor("target"), layout(call.values.get("input"))
    if target is None or target.is_floating_point() or at is None:
        return None
    if len(at.leading) != 2 or len(at.layer.shape) != 3 or at.position.dim() != target.dim() + 1:
        return None
    flat = at.position.select(1, 0)
    if flat.shape != target.shape:
        return None
    row, position = at.coordinates(flat.to(target.device))
    return Entries(row, position, (at.leading[0], at.leading[1]))


def _of_entries(call: LossCall) -> Entries | None:
    """The positions of what is compared entry by entry, where these come in the order of the layer's output."""
    given, target, at = call.tensor("input"), call.tensor("target"), layout(call.values.get("input"))
    if given is None or target is None or given.shape != target.shape or given.dim() not in (2, 3):
        return None
    if at is not None and not _in_order(at):
        return None
    rows, positions = (torch.arange(size, device=target.device) for size in given.shape[:2])
    features = (1,) * (given.dim() - 2)
    row, position = rows.view(-1, 1, *features), positions.view(1, -1, *features)
    return Entries(row.expand(given.shape), position.expand(given.shape), (given.shape[0], given.shape[1]))


def _in_order(at: Layout) -> bool:
    if len(at.leading) != 2:
        return True
    rows, positions = at.coordinates(at.position)
    return bool((rows.diff(dim=0) >= 0).all()) and bool((positions.diff(dim=1) >= 0).all())


def _classes(scores: torch.Tensor) -> int:
    return int(scores.shape[1 if scores.dim() > 1 else 0]) if scores.dim() else 0


def _never_real(step: Step, token: int, padded: torch.Tensor, classes: int) -> bool:
    """Whether labels are of the vocabulary of the inputs, with so many classes, and this token is at no real position:
    then it is no class that a label could ask for."""
    same = [e.ids for e in step.embedded if e.entries == classes and e.ids.shape == padded.shape]
    return bool(same) and not any(bool((ids == token)[~padded.to(ids.device)].any()) for ids in same)


def _counted(
    call: LossCall, at: Entries, found: PaddingMask, inside: torch.Tensor, taken: torch.Tensor, ignored: int
) -> Iterator[Finding]:
    """``inside``: the entries that are padding; ``taken``: those that the call does not leave out."""
    target = call.given["target"].detach()
    trains = trained_positions(call, at.shape) if bool(inside.any()) else None
    # whatever is predicted at padding that is masked before the call, no weight moves by it
    counted = taken if trains is None else taken & (trains.to(taken.device)[at.row, at.position] | ~inside)
    wrong = inside & counted
    if not bool((counted & ~inside).any()):
        return
    if bool(wrong.any()):
        values = torch.unique(target[wrong])
        declared = call.step.declared is not None
        in_part = len(values) > 1 or not torch.equal(wrong, inside)
        own = _of_own_row(call, at, counted & ~wrong) if in_part else True
        elsewhere = None if own else misplaced(call, at, found.mask, taken, declared=declared)
        if elsewhere is not None:
            yield elsewhere
        elif len(values) == 1 or declared:  # labels that differ may be intended
            yield _padding(
                call, found, float(values[0]) if len(values) == 1 else None, ignored, wrong, counted, own=own
            )
    elif call.one_each and call.weights is not None:
        each = call.weights.detach()[counted].double()
        if bool(((each * counted.numel() - 1).abs() <= 1e-4).all()):
            facts: dict[str, Any] = {
                "count": int(counted.sum()),
                "all": counted.numel(),
                "part": 1 - float(counted.double().mean()),
            }
            facts["change"] = used_next(str(call.place), of_losses=True)
            yield call.finds("padding_counted", "mean", **facts, level="advice")


def _padding(
    call: LossCall,
    found: PaddingMask,
    label: float | None,
    ignored: int,
    wrong: torch.Tensor,
    counted: torch.Tensor,
    *,
    own: bool,
) -> Finding:
    """``label`` is that of all padded positions; None where these have several, and the padding is declared. ``own``:
    nothing speaks against these labels being those of their rows."""
    target, over_classes = call.given["target"].detach(), "ignore_index" in call.given
    mismatch = label is not None and ignored != -100
    real = int((target[counted & ~wrong] == label).sum()) if label is not None else 0
    filled = f"labels.masked_fill({_in_code(found)}, {ignored})"
    if mismatch:
        repair = f"label padded positions {ignored}: {filled}"
        repair = repair if real else f"ignore_index={label:g}, or {repair}"
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
    facts = {
        "part": float(wrong.sum()) / float(counted.sum()),
        "count": int(wrong.sum()),
        "all": int(counted.sum()),
        "losses": _losses(call, wrong, counted),
        "label": "" if label is None else f"{label:g}",
        "labels": "labels of several values" if label is None else f"{label:g} as label",
        "culprit": f"ignore_index={ignored}" if over_classes else "",
        "repair": repair,
    }
    if mismatch:
        return call.finds("ignore_index_mismatch", "shared" if real else "", ignored=ignored, real=real, **facts)
    return call.finds("padding_counted", **facts)


def _losses(call: LossCall, wrong: torch.Tensor, counted: torch.Tensor) -> str:
    """What the loss is with the padded positions, and without."""
    if call.name != "cross_entropy":
        return ""
    target = call.given["target"].detach()
    none = -100 if int(target.min()) < 0 else -1
    each = F.cross_entropy(call.given["input"].detach().double(), target, ignore_index=none, reduction="none")
    without = float(each[counted & ~wrong].mean())
    return f"; loss {float(each[counted].mean()):.4g} with them, {without:.4g} without"


def _in_code(found: PaddingMask) -> str:
    """What says which positions are padding, in the batch's own names: ``attention_mask == 0``."""
    if found.source != "mask":
        return "is_padding"
    name, _, value = found.reason.removesuffix(" there").rpartition(" is ")
    written = {"False": f"~{name}", "True": name}.get(value)
    return written or (f"{name} == {float(value):g}" if float(value) in (0, 1) else "is_padding")


# Whether the labels are those of their rows


def _of_own_row(call: LossCall, at: Entries, real: torch.Tensor) -> bool:
    """Whether the labels of these entries are the ids that their rows were read with, at the same position or one
    ahead: then what is labelled at padded positions as well belongs to no other row."""
    target = call.given["target"].detach()
    if target.is_floating_point() or not bool(real.any()):
        return False
    for embedded in call.embedded:
        ids = embedded.ids.to(target.device)
        if tuple(ids.shape) != at.shape:
            continue
        row, position, labels = at.row[real], at.position[real], target[real]
        for ahead in (0, 1):
            inner = position + ahead < ids.shape[1]
            if bool(inner.any()) and torch.equal(ids[row[inner], position[inner] + ahead], labels[inner]):
                return True
    return False


def misplaced(
    call: LossCall, at: Entries, padded: torch.Tensor, labelled: torch.Tensor, *, declared: bool
) -> Finding | None:
    """Rows with more labels than real positions, and rows with fewer: their labels belong to one another.

    Where padding is not ``declared`` an output of padded positions may be intended, as in a translation written in
    one pass: then the lengths of all rows must come in another order, which no two texts of their own have.
    ``labelled`` are the entries that the loss takes. Where it takes all of them, the label that most padded positions
    have ends a row of labels, as ``ignore_index`` does elsewhere.
    """
    target = call.given["target"].detach()
    grid = torch.zeros(at.shape, dtype=torch.bool)
    filled = bool(labelled.all())
    if filled:
        there = padded.to(target.device)[at.row, at.position]
        labelled = target != torch.mode(target[there].flatten()).values if bool(there.any()) else labelled
    grid[at.row[labelled].cpu(), at.position[labelled].cpu()] = True
    real = ~padded.cpu()
    if not trailing(padded.cpu()):
        grid, real = grid.flip(1), real.flip(1)
    labels, tokens = _ends(grid), _ends(real)
    more, fewer = labels > tokens, labels < tokens - 1  # shifted labels are one fewer in every row
    permuted = torch.equal(labels.sort().values, tokens.sort().values)
    if not bool(more.any()) or not (permuted or (declared and bool(fewer.any()))):
        return None
    if not (filled or _one_run(grid[more | fewer])):
        return None  # labels of drawn positions may end anywhere
    first, second = int(more.nonzero()[0]), int((labels < tokens).nonzero()[0])
    facts = {"wrong": int((labels != tokens).sum()), "all": len(tokens), "permuted": permuted}
    facts |= {"first": first, "first_labels": int(labels[first]), "first_tokens": int(tokens[first])}
    facts |= {"second": second, "second_labels": int(labels[second]), "second_tokens": int(tokens[second])}
    return call.finds("labels_misplaced", **facts, culprit="target")


def _ends(grid: torch.Tensor) -> torch.Tensor:
    """For each row the number of positions up to the last one that is true."""
    return (torch.arange(1, grid.shape[1] + 1) * grid).max(1).values


def _one_run(grid: torch.Tensor) -> bool:
    """Whether what is true is one unbroken run in every row."""
    return bool((grid.int().diff(dim=1) == 1).sum(1).add(grid[:, 0].int()).le(1).all())


# Which positions train


def trained_positions(call: LossCall, shape: tuple[int, int]) -> torch.Tensor | None:
    """Of (rows, positions), those at which the gradient is not 0 wherever it can be read: at the input of the loss
    function, and at each tensor that this was made of alone.

    A prediction that is multiplied by 0, filled, replaced or written over before the call, or whose gradient is taken
    out, has a gradient of exactly 0 at one of these places: whatever is predicted there, no weight moves by it. None
    where no gradient has these axes.
    """
    grids = [(slope != 0).flatten(2).any(-1) if slope.dim() > 2 else slope != 0 for slope in _slopes(call, shape)]
    return torch.stack(grids).all(0) if grids else None


def _slopes(call: LossCall, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    """The gradients that have rows and positions in front."""
    given, arrived = call.given.get("input"), call.arrived
    if not isinstance(given, torch.Tensor) or arrived is None or given.grad_fn is None:
        return
    edges = list(_before(given.grad_fn))
    try:
        found = torch.autograd.grad(given, edges, arrived, retain_graph=True, allow_unused=True) if edges else ()
    except RuntimeError:
        found = ()  # a tensor of the graph was written to since: only the gradient that arrived is known
    for slope in (arrived, *found):
        if slope is not None and tuple(slope.shape[:2]) == shape:
            yield slope.detach()


def _before(node: torch.autograd.graph.Node) -> Iterator[GradientEdge]:
    """What a node's result was made of, as long as that is one tensor with a history."""
    for _ in range(FARTHEST):
        following = [(before, number) for before, number in node.next_functions if before is not None]
        if len(following) != 1 or not following[0][0].next_functions:
            return
        node, number = following[0]
        yield GradientEdge(node, number)
