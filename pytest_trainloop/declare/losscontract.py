"""``LossContract``: what a loss function promises, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.refusals import is_range, is_whole, one_of, refused, refusing_slips, validated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


_refused, _one_of = partial(refused, "LossContract"), partial(one_of, "LossContract")

_REQUIRED = {
    "criterion": "a function criterion(output, target) or a module is needed",
    "expects": "what the output is is needed, as in expects='logits'",
}

TARGETS: Mapping[str, tuple[str, ...]] = {
    "logits": ("index", "distribution", "binary", "pair"),
    "log_probabilities": ("index", "distribution", "pair"),
    "probabilities": ("index", "distribution", "binary", "pair"),
    "values": ("value", "binary", "pair"),
    "embeddings": ("index", "pair", "binary", "value"),
}
"""The targets that go with each kind of output."""

REDUCTIONS = ("mean", "sum", "none")


@refusing_slips(_REQUIRED)
@dataclass(frozen=True, slots=True, kw_only=True)
class LossContract:
    """What a loss function promises, for ``@pytest.mark.trainloop_loss``.

    >>> contract = LossContract(criterion=FocalLoss(gamma=2.0), expects="logits", target="index", num_classes=10)

    Outputs are floating-point tensors: scores and probabilities ``(rows, classes, *shape)``, or ``(rows, *shape)`` with
    a binary target; values ``(rows, *shape)``; embeddings ``(rows, embedding_dim)``. Targets are ``(rows, *shape)``:
    class indices int64, all others of the outputs' dtype. A distribution and the second of a pair have the shape of
    the output.

    Parameters
    ----------
    criterion
        ``criterion(output, target) -> tensor``, a function or a module. With two outputs ``criterion(a, b, target)``,
        and with ``target="pair"`` ``criterion(a, b)``: two views, student and teacher, prediction and target of one
        kind
    expects
        what the output is: class scores, their log-softmax, probabilities, plain numbers, or embeddings (rows, dim)
    target
        class indices; a distribution over the classes; one of two ``labels``; numbers; or the second of a pair
    num_classes
        the length of the class axis; with ``target="binary"`` the number of labels of one row, if there are several;
        with embeddings the number of different labels
    ignore_index
        the target whose positions do not count
    reduction
        what a call returns. None: what the criterion's own ``reduction`` says, else the mean
    shape
        the sizes of one row's positions: ``()`` for a class per row, ``(6,)`` for tokens, ``(4, 4)`` for pixels
    class_dim
        the class axis of the output: 1 as torch has it, -1 for (rows, tokens, classes)
    num_outputs
        for values: how many numbers the output has for one target, as mean and log-variance (2)
    embedding_dim
        the length of each embedding
    views
        how many outputs the criterion takes: 2 for embeddings with a pair, a label or a value, 3 for triplets, else 1
    labels
        the two values of a binary target: (0, 1), or (-1, 1) for hinge losses
    output_range, target_range
        bounds of values: ``(0.0, math.inf)`` for counts and variances
    min_rows
        the fewest rows that the criterion is made for

    Raises
    ------
    UsageError
        two fields contradict each other, or one is missing; the message says what is needed
    """

    criterion: Callable[..., torch.Tensor]
    expects: Literal["logits", "log_probabilities", "probabilities", "values", "embeddings"]
    target: Literal["index", "distribution", "binary", "value", "pair"] = "index"
    num_classes: int | None = None
    ignore_index: int | None = None
    reduction: Literal["mean", "sum", "none"] | None = None
    shape: tuple[int, ...] = ()
    class_dim: int = 1
    num_outputs: int | None = None
    embedding_dim: int = 8
    views: int | None = None
    labels: tuple[float, float] = (0.0, 1.0)
    output_range: tuple[float, float] = (-math.inf, math.inf)
    target_range: tuple[float, float] = (-math.inf, math.inf)
    min_rows: int = 1

    def __post_init__(self) -> None:
        validated(self, _validate)


def _validate(contract: LossContract) -> None:
    """Raise ``UsageError`` for the first field that cannot be judged."""
    if not callable(contract.criterion) or isinstance(contract.criterion, type):
        raise refused(
            "LossContract", "criterion", _an(contract.criterion), "a function criterion(output, target) or a module"
        )
    _one_of("expects", contract.expects, TARGETS)
    one_of(
        "LossContract", "target", contract.target, dict.fromkeys(word for words in TARGETS.values() for word in words)
    )
    if contract.target not in TARGETS[contract.expects]:
        fitting = " or ".join(repr(word) for word in TARGETS[contract.expects])
        raise UsageError(
            f"LossContract: expects={contract.expects!r} with target={contract.target!r} says no call that a loss has; "
            f"target={fitting} goes with it"
        )
    if contract.reduction is not None:
        _one_of("reduction", contract.reduction, dict.fromkeys(REDUCTIONS))
    _sizes(contract)
    _numbers(contract)


def needs_classes(contract: LossContract) -> bool:
    """Whether outputs or targets of this kind cannot be made without the number of classes."""
    over_classes = contract.expects in ("logits", "log_probabilities", "probabilities")
    return contract.target in ("index", "distribution") or (over_classes and contract.target == "pair")


def _sizes(contract: LossContract) -> None:
    if contract.num_classes is None:
        if needs_classes(contract):
            raise UsageError(
                f"LossContract.num_classes is not given; expects={contract.expects!r} with target={contract.target!r} "
                "needs the number of classes, as in num_classes=10"
            )
    elif not is_whole(contract.num_classes, least=2):
        raise _refused("num_classes", repr(contract.num_classes), "a whole number from 2 on")
    elif contract.expects == "values":
        raise UsageError("LossContract.num_classes is given, but values have no classes; num_outputs says how many "
                         "numbers the output has for one target value")  # fmt: skip
    if contract.num_outputs is not None and contract.expects != "values":
        raise UsageError(f"LossContract.num_outputs is given; it goes with expects='values', not {contract.expects!r}")
    if contract.ignore_index is not None and not is_whole(contract.ignore_index):
        raise refused(
            "LossContract",
            "ignore_index",
            repr(contract.ignore_index),
            "a whole number, the target that does not count",
        )
    if contract.ignore_index is not None and contract.target not in ("index", "binary", "value"):
        raise UsageError(f"LossContract.ignore_index is given, but no entry of target={contract.target!r} can equal it")
    for name, least in (("num_outputs", 1), ("embedding_dim", 1), ("views", 1), ("min_rows", 1)):
        given = getattr(contract, name)
        if given is not None and not is_whole(given, least=least):
            raise _refused(name, repr(given), f"a whole number from {least} on")
    if contract.views == 1 and contract.expects == "embeddings" and contract.target != "index":
        raise UsageError("LossContract.views is 1, but a pair is two tensors of embeddings; where your criterion takes "
                         "them as one, give criterion=lambda a, b: loss(torch.cat([a, b]))")  # fmt: skip
    if not isinstance(contract.shape, (tuple, list)) or not all(is_whole(n, least=1) for n in contract.shape):
        raise refused(
            "LossContract", "shape", repr(contract.shape), "the sizes of one row's positions: (), (6,) or (4, 4)"
        )
    if contract.shape and contract.expects == "embeddings":
        raise UsageError("LossContract.shape is given, but embeddings are (rows, embedding_dim)")
    axes = 2 + len(contract.shape)
    if not is_whole(contract.class_dim) or contract.class_dim % axes == 0 or not -axes <= contract.class_dim < axes:
        raise refused(
            "LossContract",
            "class_dim",
            repr(contract.class_dim),
            f"an axis of the output's {axes} other than the rows'",
        )


def _numbers(contract: LossContract) -> None:
    for name in ("labels", "output_range", "target_range"):
        pair = getattr(contract, name)
        if not is_range(pair):
            raise _refused(name, repr(pair), "a tuple of two numbers, the smaller one first,")


def _an(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return "None" if value is None else f"of type {type(value).__name__}"
