"""``CallContract``: what a loss function takes, argument by argument, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.refusals import an, is_range, is_whole, one_of, refused, refusing_slips, validated

HOLDS: Mapping[str, str] = {
    "logits": "raw scores",
    "class_logits": "raw scores of classes",
    "log_probabilities": "log-probabilities",
    "probabilities": "probabilities",
    "values": "plain numbers",
    "variance": "variances",
    "embeddings": "embeddings",
    "boxes": "boxes as (x1, y1, x2, y2)",
    "images": "images in a range",
    "distribution_value": "what a distribution is asked of",
    "index": "class indices",
    "one_hot": "zeros and ones, one 1 along the class axis",
    "distribution": "probabilities over the classes",
    "binary": "one of two labels",
    "value": "plain numbers",
    "labels": "a label for each embedding",
}
"""What an argument of a loss function can hold, in words."""

OF_TARGETS = ("index", "one_hot", "distribution", "binary", "value", "labels")


_refused, _one_of = partial(refused, "CallContract"), partial(one_of, "CallContract")

_ARGUMENTS = "a dict from parameters to what they hold is needed, as in {'scores': 'logits', 'mask': 'binary'}"

GIVES = ("loss", "similarity")


@refusing_slips({"arguments": _ARGUMENTS})
@dataclass(frozen=True, slots=True, kw_only=True)
class CallContract:
    """What a function takes, argument by argument, for ``register_contract``.

    >>> contract = CallContract(arguments={"scores": "logits", "mask": "binary"})

    Parameters
    ----------
    arguments
        by the name of a parameter of the function (of ``forward`` for a module) what it holds: ``"logits"``,
        ``"class_logits"``, ``"probabilities"``, ``"log_probabilities"``, ``"values"``, ``"variance"``,
        ``"embeddings"`` (rows, dim), ``"boxes"`` (boxes, 4) as x1, y1, x2, y2, ``"images"``; of targets
        ``"index"``, ``"one_hot"``, ``"distribution"``, ``"binary"``, ``"value"``, ``"labels"`` (embeddings,). Scores
        are over classes next to an index, a one-hot or a distribution, else each is a yes or no
    when
        flags, by the name of another parameter of the function or of an attribute of the module, and the values with
        which this contract holds; several contracts may be registered for one function, and the first that fits counts
    class_dim
        the class axis of scores and probabilities
    ignore_index
        the target that does not count, or the name of the parameter or attribute that holds it
    labels
        the two values of a binary target
    value_range
        bounds of images, or the name of the parameter or attribute that holds the upper one
    gives
        ``"loss"``, or ``"similarity"``: larger is better, and its negative, or 1 minus it, is the loss
    pairwise
        whether each row of one argument is compared with each row of the other: the result is a table (N, M)
    page
        the page that says so, for the failure text

    Raises
    ------
    UsageError
        a field is of another kind than said here; the message says what is needed
    """

    arguments: Mapping[str, str]
    when: Mapping[str, object] = field(default_factory=dict)
    class_dim: int = 1
    ignore_index: int | str | None = None
    labels: tuple[float, float] = (0.0, 1.0)
    value_range: tuple[float, float] | str | None = None
    gives: Literal["loss", "similarity"] = "loss"
    pairwise: bool = False
    page: str = ""

    def __post_init__(self) -> None:
        validated(self, _validate)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The arguments that a model gives, in order."""
        return tuple(name for name, word in self.arguments.items() if word not in OF_TARGETS)

    @property
    def target(self) -> str | None:
        """The argument that holds the target."""
        return next((name for name, word in self.arguments.items() if word in OF_TARGETS), None)

    @property
    def over_classes(self) -> bool:
        """Whether scores are over classes: one of several is right."""
        words = set(self.arguments.values())
        return bool(words & {"index", "one_hot", "distribution", "class_logits"})


def _validate(contract: CallContract) -> None:
    """Raise ``UsageError`` for the first field that cannot be judged."""
    _one_of("gives", contract.gives, GIVES)
    _arguments(contract)
    when = contract.when
    if not isinstance(when, Mapping):
        needed = "a dict from flags to their values, as in when={'from_logits': False},"
        raise _refused("when", an(when), needed)
    for name in when:
        if not isinstance(name, str):
            raise UsageError(f"CallContract.when names {name!r}; the name of a parameter or an attribute is needed")
    if not is_whole(contract.class_dim):
        raise _refused("class_dim", an(contract.class_dim), "the number of the class axis")
    ignored, bounds = contract.ignore_index, contract.value_range
    if ignored is not None and not is_whole(ignored) and not _is_name(ignored):
        needed = "a whole number, or the name of the parameter or attribute that holds it,"
        raise _refused("ignore_index", an(ignored), needed)
    if not is_range(contract.labels):
        raise _refused("labels", an(contract.labels), "a tuple of two numbers, the smaller one first,")
    if bounds is not None and not is_range(bounds) and not _is_name(bounds):
        needed = "a tuple of two numbers, the smaller one first, or the name of the parameter that holds the upper one,"
        raise _refused("value_range", an(bounds), needed)
    if not isinstance(contract.pairwise, bool):
        raise _refused("pairwise", an(contract.pairwise), "True or False")
    if not isinstance(contract.page, str):
        raise _refused("page", an(contract.page), "the address of a page, a string,")


def _arguments(contract: CallContract) -> None:
    given: Any = contract.arguments
    if not isinstance(given, Mapping):
        raise UsageError(f"CallContract.arguments is {an(given)}; {_ARGUMENTS}")
    if not given and contract.gives == "loss":
        raise UsageError(f"CallContract.arguments is empty; {_ARGUMENTS}")
    for name, word in given.items():
        if not _is_name(name):
            raise UsageError(f"CallContract.arguments names {an(name)}; the name of a parameter is needed")
        _one_of(f"arguments[{name!r}]", word, HOLDS)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()
