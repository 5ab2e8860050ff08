"""Which option the name of a key of a parameter group refers to, where the optimizer has no option of this name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

OTHER_NAMES = {
    "learning_rate": "lr",
    "learningrate": "lr",
    "lrate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "l2": "weight_decay",
    "epsilon": "eps",
    "beta": "betas",
    "mom": "momentum",
}
"""Names by which an option of torch's optimizers is known elsewhere."""

_FILL = frozenset({"", "rate", "value", "val", "coef", "coefficient", "param", "parameter", "opt", "optim"})
"""Words around the full name of an option that leave its meaning as it is."""

_FACTOR = frozenset({"scale", "mult", "multiplier", "mul", "factor", "ratio", "coef", "coeff"})

_MEMORY = frozenset(
    "init initial base max min target peak start end final last warmup warm swa orig original old prev previous "
    "default current cur schedule scheduler step steps epoch epochs gamma layer ema drop dropout".split()
)
"""Words of what a schedule keeps in a group next to the option."""

_RATE = (["lr"], ["learning", "rate"], ["learningrate"], ["rate"])
_DECAY = (["wd"], ["weight", "decay"], ["weightdecay"], ["decay"])

_LEAST_SPELLED = 5
"""Letters of an option that identify a misspelled key: two of a shorter one may be another word."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The option that a key names; ``multiplies``: it is a multiple of the option, and not the option itself."""

    option: str
    multiplies: bool = False


def meaning(key: str, options: Collection[str]) -> Meaning | None:
    """The option that a key names in other words; None where it is one of them, or something else."""
    if key in options or key == "params":
        return None
    words = re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower())
    if _MEMORY.intersection(words):
        return None
    return _multiple(words, options) or _option(words, options)


def _multiple(words: Sequence[str], options: Collection[str]) -> Meaning | None:
    factors = [word for word in words if word in _FACTOR]
    rest = [word for word in words if word and word not in _FACTOR]
    if len(factors) != 1:
        return None
    if rest in _RATE and "lr" in options:
        return Meaning("lr", multiplies=True)
    if rest == ["decay"] and factors[0] not in ("scale", "mult", "multiplier"):
        return None  # "decay_factor" is that of a schedule
    return Meaning("weight_decay", multiplies=True) if rest in _DECAY and "weight_decay" in options else None


def _option(words: Sequence[str], options: Collection[str]) -> Meaning | None:
    plain = "_".join(words).strip("_")
    other = OTHER_NAMES.get(plain, plain)
    if other in options:
        return Meaning(other)
    for option in sorted(options, key=len, reverse=True):
        parts = option.split("_")
        for at in range(len(words) - len(parts) + 1):
            around = [*words[:at], *words[at + len(parts) :]]
            if list(words[at : at + len(parts)]) == parts and _FILL.issuperset(around):
                return Meaning(option)
    near = (o for o in options if len(o) >= _LEAST_SPELLED and 0 < distance(plain, o) <= 2)
    return next((Meaning(option) for option in near), None)


def distance(one: str, other: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour, to make one word of the other."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]
