"""The rules of each call, in their order, and what only functions in the table of losses are judged by.

``rules_of`` reads as the table of losses does: an argument is judged by the word that the table has for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_contract.call import WAITING_STEPS, bounds, listed
from pytest_trainloop.checks.loss.loss_contract.ctc import ctc
from pytest_trainloop.checks.loss.loss_contract.padding import divided_by_the_others, one_of_two_classes, padding
from pytest_trainloop.checks.loss.loss_contract.scores import (
    TAKES_LOG_SOFTMAX,
    TAKES_SIGMOID,
    divergence,
    log_probabilities,
    probabilities,
    products,
    scores,
    written_out,
)
from pytest_trainloop.checks.loss.loss_contract.shapes import (
    all_equal,
    asked_value,
    broadcast,
    differences,
    rows_times_a_column,
)
from pytest_trainloop.checks.loss.loss_contract.targets import (
    axis_of_classes,
    class_indices,
    class_probabilities,
    class_weights,
    entry_weights,
    index_lists,
    rate,
    refused,
    two_labels,
    variance,
)
from pytest_trainloop.core.whose import present
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_names import CLASS_LOSSES, DISTANCE_LOSSES, SIGN_LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import LossCall
    from pytest_trainloop.core.finding import Finding, Level

    Findings = Iterator[Finding]
    Rule = Callable[[LossCall], Findings]

FAR = 100.0
"""How many times wider than its images a range is that was made for others: bytes have 255 times that of [0, 1]."""


def rules_of(call: LossCall) -> Iterator[Rule]:
    """What a call is judged by; each rule by itself, since torch may refuse what one computes."""
    name, takes = call.name, call.takes
    if call.error is not None:
        yield refused
        return
    if call.known is not None:
        yield of_table
    elif name in TAKES_LOG_SOFTMAX | TAKES_SIGMOID:
        yield scores
    elif takes.get("input") == "probabilities":
        yield probabilities
    elif name in ("nll_loss", "ctc_loss", "gather"):
        yield log_probabilities
    if name in CLASS_LOSSES:
        yield axis_of_classes
        yield class_indices
        yield class_probabilities
        yield class_weights
        yield one_of_two_classes
    if call.of_torch and takes.get("target") == "binary":
        yield two_labels
        yield entry_weights
    if name in DISTANCE_LOSSES | SIGN_LOSSES | {"kl_div", "gaussian_nll_loss"}:
        yield broadcast
    if name in CLASS_LOSSES | DISTANCE_LOSSES | {"binary_cross_entropy_with_logits"}:
        yield padding
        yield divided_by_the_others
    if name in BY_NAME:
        yield BY_NAME[name]
    if call.of_torch or call.known is not None or name == "gather":
        yield sign


def of_table(call: LossCall) -> Findings:
    """A function of a library, or of the project, that a contract says of what it takes."""
    contract = present(call.known, "the contract of a call").contract
    for name, word in contract.arguments.items():
        if not isinstance(call.given.get(name), torch.Tensor):
            continue
        found: list[Finding] = []
        if word in ("logits", "class_logits"):
            found = [*scores(call), *(axis_of_classes(call) if call.over_classes and call.class_dim == 1 else ())]
        elif word in BY_WORD:
            found = list(BY_WORD[word](call))
        elif word in BY_WORD_AND_NAME:
            found = list(BY_WORD_AND_NAME[word](call, name))
        if found:
            yield found[0]  # what is wrong with the first argument leaves nothing to say of the others
            return
    if call.unstepped:
        facts = {"weights": ", ".join(call.unstepped), "steps": WAITING_STEPS, "culprit": call.unstepped[0]}
        yield call.finds("criterion_not_trained", **facts)
    n = len(call.weights) if contract.pairwise and call.weights is not None and call.weights.dim() == 2 else 0
    if n > 1 and call.weights is not None and call.weights.shape[1] == n and all_equal(call.weights):
        yield call.finds("broadcast", "table", pairs=n * n, rows=n)


def sign(call: LossCall) -> Findings:
    """A loss that is maximised, or a likelihood or a similarity that is minimised."""
    weights = call.weights
    if weights is None or call.root is None or weights.shape != call.out.shape:
        return
    raised, lowered = bool((weights < 0).any()), bool((weights > 0).any())
    target, value, known = call.given.get("target"), call.values.get("input"), call.known
    if raised and not lowered and call.of_torch:
        alone = call.alone and not (isinstance(target, torch.Tensor) and target.requires_grad)
        yield flipped(
            call,
            f"is maximised: what is backpropagated {'is its negative' if alone else 'subtracts it'}",
            "" if alone else "add it in place of subtracting it",
            level="fault" if alone else "advice",
        )
    if raised or not lowered:
        return
    if call.name == "gather" and value is not None and value.op == "log_softmax":
        if call.alone and all_equal(weights):
            yield flipped(call, "of log-probabilities is minimised: what is backpropagated is not its negative")
    elif known is not None and call.name.endswith(".log_prob"):
        asked = call.tensor("value")
        given = asked is not None and asked.is_floating_point() and not call.given["value"].requires_grad
        # an action may be made less likely
        if given and asked is not None and call.alone and all_equal(weights) and _of_batch(call, asked):
            why = "of the data is minimised: what is backpropagated is the log-likelihood"
            yield flipped(call, why, "-log_prob(y).mean()")
    elif known is not None and call.name.endswith(".entropy"):
        logs = [c.weights for c in call.step.calls if c.name.endswith(".log_prob") and c.known and c.weights is not None
                and c.known.owner is known.owner]  # fmt: skip
        if any(bool((w > 0).any()) and bool((w < 0).any()) for w in logs):
            why = "of the policy is minimised: the entropy bonus has the wrong sign"
            yield flipped(call, why, "loss = policy_loss - coefficient * entropy.mean()")
    elif known is not None and known.contract.gives == "similarity" and "." not in call.name:
        why = "is minimised: it is larger the more its arguments agree"
        yield flipped(call, why, f"1 - {call.name}(...), or its negative")


def flipped(call: LossCall, why: str, repair: str = "", level: Level = "fault") -> Finding:
    return call.finds("sign_flipped", why=why, root=f"{call.root:.4g}", alone=call.alone, repair=repair, level=level)


def _of_batch(call: LossCall, value: torch.Tensor) -> bool:
    """Whether these are numbers of the batch, and none that were sampled."""
    batch = tensors_in(call.step.batch)
    return any(t.numel() == value.numel() and bool((t.reshape(-1) == value.reshape(-1)).all()) for t in batch)


def row_labels(call: LossCall, name: str) -> Findings:
    """One label for each embedding: a loss of pairs needs two that are equal, and two that differ."""
    labels = call.tensor(name)
    if labels is None or labels.dim() != 1 or len(labels) < 2 or call.out.detach().double().sum() != 0:
        return
    kinds = len(torch.unique(labels))
    if kinds in (1, len(labels)) and (call.arrived is None or not bool(call.arrived.any())):
        repair = "sample rows of several classes in a batch"
        if kinds > 1:
            repair = "sample several rows of each class (MPerClassSampler), or where labels are made give both "
            repair += "views of a row one label: torch.arange(n).repeat(2)"
        facts = {"positive": kinds > 1, "different": kinds, "all": len(labels)}
        yield call.finds("no_pairs", **facts, culprit=name, repair=repair)


def images(call: LossCall, name: str) -> Findings:
    """Images of the data in another range than the declared one."""
    given, declared = call.tensor(name), call.known.contract.value_range if call.known is not None else None
    upper: Any = call.given.get(declared) if isinstance(declared, str) else declared
    upper = upper[1] - upper[0] if isinstance(upper, tuple) else upper
    if given is None or call.values[name].history or not isinstance(upper, (int, float)) or not given.numel():
        return
    span = float(given.max()) - min(0.0, float(given.min()))
    if upper and span > 0 and (upper >= FAR * span or span >= FAR * upper):
        facts = {"upper": f"{upper:g}", "seen": bounds(given), "high": f"{float(given.max()):.4g}"}
        repair = f"pass {declared}={1 if span <= 1 else 255}"
        yield call.finds("value_range", **facts, culprit=name, repair=repair)


def boxes(call: LossCall, name: str) -> Findings:
    """Boxes that are read as (x1, y1, x2, y2): corners in order, and both sides in one format."""
    given = call.tensor(name)
    if given is None or given.dim() < 1 or given.shape[-1] != 4 or not given.numel():
        return
    predicted = call.values[name].history
    for other in call.step.calls if predicted else ():
        if other.name not in DISTANCE_LOSSES or other.given["input"] is not call.given[name]:
            continue
        theirs = other.given["target"]
        mine = next((v for n, v in call.given.items() if n not in (name, "input") and _is_like(v, given)), None)
        at, size = theirs[..., :2], theirs[..., 2:]
        for fmt, low in (("cxcywh", at - size / 2), ("xywh", at)):
            if mine is not None and _close(torch.cat([low, low + size], -1), mine) and not _close(theirs, mine):
                repair = "convert the predictions as the targets are converted: "
                repair += f"box_convert(boxes, in_fmt='{fmt}', out_fmt='xyxy')"
                facts = {"here": listed(mine.reshape(-1, 4)[0]), "there": listed(theirs.reshape(-1, 4)[0])}
                facts |= {"fmt": fmt, "place": f"{other.place.file}:{other.place.line}"}
                yield call.finds("box_format", "two", **facts, culprit=name, repair=repair)
                return
    wrong = (given[..., 2] < given[..., 0]) | (given[..., 3] < given[..., 1])
    if bool(wrong.any()):
        sizes = not predicted and bool((given[..., 2:] >= 0).all())
        convert = "box_convert(boxes, in_fmt='cxcywh', out_fmt='xyxy'); in_fmt='xywh' if the first two are the corner"
        how = "the boxes of the data"
        if sizes:
            how += ": all their last two numbers are at least 0, as widths and heights are"
        if predicted:
            how = "the values of every call; nothing between the last layer and the loss orders the corners"
        yield call.finds(
            "box_format",
            count=int(wrong.sum()),
            all=wrong.numel(),
            whose="predicted" if predicted else "target",
            sizes=sizes,
            name=name,
            seen=listed(given.reshape(-1, 4)[wrong.reshape(-1)][0]),
            how=how,
            culprit=name,
            level="advice" if predicted else "fault",
            every=predicted,
            repair=convert if sizes or predicted else "order the corners: x1 <= x2 and y1 <= y2",
        )


def _is_like(value: Any, given: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == given.shape


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the rounding of a sum and a half."""
    if left.shape != right.shape:
        return False
    allowed = 8 * torch.finfo(right.dtype).eps * (1 + right.detach().abs().max()) if right.is_floating_point() else 0.0
    return bool(((left.detach().double() - right.detach().double()).abs() <= allowed).all())


BY_NAME: dict[str, Rule] = {
    "kl_div": divergence,
    "ctc_loss": ctc,
    "multilabel_margin_loss": index_lists,
    "gaussian_nll_loss": variance,
    "poisson_nll_loss": rate,
    "logsumexp": written_out,
    "softplus": written_out,
    "log1p": written_out,
    "product": products,
    "difference": differences,
    "outer": rows_times_a_column,
}
"""What only one function takes."""
BY_WORD: dict[str, Rule] = {
    "probabilities": probabilities,
    "log_probabilities": log_probabilities,
    "binary": two_labels,
    "one_hot": two_labels,
    "index": class_indices,
}
BY_WORD_AND_NAME: dict[str, Callable[[LossCall, str], Findings]] = {
    "labels": row_labels,
    "boxes": boxes,
    "images": images,
    "distribution_value": asked_value,
}
"""What an argument of a function in the table of losses is judged by."""
