"""What to write in place of an operation that is not finite, by what its input comes from. Plain data, no torch.

A clamp hides a zero that is structural: a softmax or a sigmoid underflows for every score far enough away, and the
entries at the clamp get no gradient from then on. The logarithm is taken of the scores instead.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Repair(NamedTuple):
    """One line of code where it is known, then alternatives; and what only silences the check."""

    text: str
    do_not: str = ""


_CLAMPED = "clamp it, or add an eps: {source} is exactly 0 for scores far enough away, and clamped entries never train"

_BY_SOURCE = {
    ("log", "softmax"): Repair(
        "F.log_softmax(scores, dim=-1) in place of the logarithm of a softmax; or cross_entropy on the scores",
        _CLAMPED.format(source="a softmax"),
    ),
    ("log", "sigmoid"): Repair(
        "F.logsigmoid(scores), and F.logsigmoid(-scores) for the logarithm of 1 - sigmoid; or "
        "binary_cross_entropy_with_logits",
        _CLAMPED.format(source="a sigmoid, or 1 minus one,"),
    ),
    ("log", "sub"): Repair(
        "make the difference positive where it is made: (F.softplus(raw) + eps).log(), or start from points that "
        "differ",
        "clamp it: where both sides are equal no gradient would ever make them differ",
    ),
}

_BY_OPERATION = {
    ("log", "log2", "log10"): Repair(
        "(x + eps).log(), which keeps a gradient at 0; leave out entries that are 0 by design (a mask, an empty row)",
        "clamp_min: entries below it get no gradient",
    ),
    ("sqrt", "rsqrt", "norm", "vector_norm", "linalg_vector_norm", "cdist", "std"): Repair(
        "(x + eps).sqrt(): the slope of a root at 0 is infinite"
    ),
    ("div", "__truediv__", "__rtruediv__", "true_divide", "reciprocal", "div_"): Repair(
        "x / (y + eps), or y.clamp_min(eps) where y is a count; F.normalize does it for directions"
    ),
    ("exp", "exp2", "expm1", "logsumexp", "softmax", "cosh", "sinh"): Repair(
        "(x - x.amax(-1, keepdim=True)).exp(), or logsumexp and log_softmax; and cap the scale that multiplies x"
    ),
    ("pow", "__pow__"): Repair("(x + eps) ** p for exponents below 1; smaller numbers for large ones"),
    ("mean", "var"): Repair("leave out empty selections: the mean over no entries is NaN"),
}

_OTHERS = Repair("keep the inputs within bounds (normalise, an eps), or compute this operation in float32")

_LOG_OF_SOFTMAX = re.compile(r"(?:torch\.)log\(\s*(?:torch|F|nn\.functional)\.softmax\(([^()]*)\)\s*\)")
_LOG_OF_SIGMOID = re.compile(r"(?:torch\.)log\(\s*(?:torch|F)\.sigmoid\(([^()]*)\)\s*\)")


def repair_of(operation: str, source: str, lowest: float, code: str) -> Repair:
    """``source`` is the operation that made its input, ``lowest`` its smallest entry, ``code`` the user's line."""
    if lowest < 0 and operation in ("log", "log2", "log10", "sqrt", "rsqrt"):
        return Repair(
            f"{operation}() takes no negative numbers: make its input positive first (x.exp(), F.softplus(x), "
            "x.square()), or look for a sign",
            "clamp it: negative entries get no gradient from then on",
        )
    kind = "log" if operation in ("log", "log2", "log10") else operation
    repair = _BY_SOURCE.get((kind, source))
    if repair is None:
        return next((found for ops, found in _BY_OPERATION.items() if operation in ops), _OTHERS)
    for pattern, named in ((_LOG_OF_SOFTMAX, r"F.log_softmax(\1)"), (_LOG_OF_SIGMOID, r"F.logsigmoid(\1)")):
        if pattern.search(code):
            return Repair(f"{pattern.sub(named, code)}\n{repair.text}", repair.do_not)
    return repair
