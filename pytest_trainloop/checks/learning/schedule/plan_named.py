"""What a project's own words say of the length of a schedule: the names in the expression that builds it."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.plan_text import plan_finding
from pytest_trainloop.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.projection import Projected

LENGTHS = {
    "CosineAnnealingLR": ("T_max", 1),
    "OneCycleLR": ("total_steps", 2),
    "PolynomialLR": ("total_iters", 1),
    "get_linear_schedule_with_warmup": ("num_training_steps", 2),
    "get_cosine_schedule_with_warmup": ("num_training_steps", 2),
    "get_polynomial_decay_schedule_with_warmup": ("num_training_steps", 2),
    "get_scheduler": ("num_training_steps", 3),
}
"""The parameter that is the number of calls of the whole training, by name and position."""

MANY_PASSES = 1000
"""Calls of a schedule that is called once a pass, above which no known recipe has so many passes (nnU-Net has 1000)."""


def named_after_another(one: Projected) -> Iterator[Finding]:
    """A schedule whose own arguments name another unit than it is called by; advice but where they contradict."""
    per_pass, passes = one.settings.get("steps_per_epoch", 1), one.settings.get("epochs", 0)
    if one.unit == "pass" and per_pass > 1 and passes:
        yield plan_finding(
            one,
            "counts_something_else",
            f"{one.kind} is built with {per_pass} steps an epoch, and is called once a pass: {passes} passes make "
            f"{passes} of its {passes * per_pass} calls",
            f"steps_per_epoch={per_pass}, epochs={passes}; "
            f"{one.sizes[0].calls} calls in {count(one.sizes[0].counts.passes or 0, 'pass')} over the batches",
            "the number of calls does not grow with the batches of a pass",
            repair="call it after each optimizer.step()",
        )
        return
    text = length_text(one.made_at_line, one.kind)
    if one.unit == "step" and text and _passes_only(text) and one.planned is None:
        yield plan_finding(
            one,
            "counts_something_else",
            f"{one.kind} is built for {text} calls, which names passes, and is called once a step",
            f"{one.sizes[0].calls} calls in {count(one.sizes[0].counts.passes or 0, 'pass')} over the batches",
            "the number of calls grows with the batches of a pass",
            level="advice",
            repair="call it once a pass, or build it for len(loader) * epochs calls",
        )
    elif one.unit == "pass" and one.planned is None and not one.made_in_fit:
        yield from _many_passes(one, text)


def _many_passes(one: Projected, text: str) -> Iterator[Finding]:
    end = one.horizon
    steps = "len(" in text or re.search(r"steps|iters", text)
    if end is None or not (end > MANY_PASSES or (text and steps)) or (text and not steps):
        return
    yield plan_finding(
        one,
        "counts_something_else",
        f"{one.kind} is built for {text or end} calls, and is called once a pass over the batches",
        f"its last change is at call {end}",
        f"{one.sizes[0].calls} calls in {count(one.sizes[0].counts.passes or 0, 'pass')} over the batches",
        level="advice",
        repair="call it after each optimizer.step(), or build it for as many calls as there are epochs",
    )


def _passes_only(text: str) -> bool:
    """Whether an expression is a number of passes: it names epochs, and neither batches, steps nor a product."""
    return bool(re.search(r"epochs", text)) and not re.search(r"steps?|iters?|len\(|batch|\*|loader|per_", text)


def length_text(place: tuple[str, int], kind: str) -> str:
    """The expression that is given as the number of calls where a scheduler is built; empty where it is not told."""
    file, line = place
    tree = _parsed(file) if file else None
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call) or not node.lineno <= line <= (node.end_lineno or line):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in LENGTHS or (name[0].isupper() and name != kind):
            continue
        keyword, position = LENGTHS[name]
        given = next((k.value for k in node.keywords if k.arg == keyword), None)
        if given is None and len(node.args) > position:
            given = node.args[position]
        return "" if given is None or isinstance(given, ast.Constant) else ast.unparse(given)
    return ""


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
