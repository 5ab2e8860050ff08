"""Metrics given to ReduceLROnPlateau whose names say that more is better, with ``mode="min"``, and the reverse."""

from __future__ import annotations

import ast
import math
import re
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import calls_of, line_of
from pytest_trainloop.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record

RISES = frozenset(
    "acc accs accuracy accuracies auc auroc auprc f1 map miou iou dice psnr ssim bleu rouge meteor cider recall kappa "
    "ndcg mrr reward rewards r2 aucs".split()
)
"""Words of names of metrics of which more is better."""

FALLS = frozenset(
    "loss losses error errors err mse rmse mae nll perplexity ppl wer cer fid epe bpc bpb divergence".split()
)
"""Words of names of metrics of which less is better."""

_TURNED = frozenset("neg negative minus inv inverse inverted one best".split())
"""Words that may turn a metric round, or stand for another one."""

_PLAIN = ("item", "mean", "cpu", "detach", "numpy", "compute", "avg")
"""Methods and functions that leave the direction of a metric as it is."""


def metric_of_other_mode(record: Record) -> Iterator[Finding]:
    """The name is the project's own word for what the number is; its sign must not have been turned."""
    for scheduler in record.schedulers:
        mode = scheduler.settings.get("mode", "").strip("'")
        calls = [c for c in calls_of(record, scheduler.number) if not math.isnan(c.value)]
        if not scheduler.plateau or not calls or any(c.value < 0 for c in calls) or not any(c.value for c in calls):
            continue
        name = argument_of(calls[0].place.code)
        better = direction(name)
        if not better or better == mode or {argument_of(c.place.code) for c in calls} != {name}:
            continue
        moves = "rises" if better == "max" else "falls"
        yield Finding(
            cause="plateau_mode",
            summary=(
                f'ReduceLROnPlateau(mode="{mode}") is given {name}, which is better the '
                f"{'more' if better == 'max' else 'less'} it is: it lowers the rate while {name} {moves}"
            ),
            measured=f"{name} is {', '.join(f'{c.value:.4g}' for c in calls[:4])} in {len(calls)} calls",
            shown_by=f'mode="{mode}" waits for a metric that {"falls" if mode == "min" else "rises"}',
            culprits=("mode",),
            kinds=("attribute",),
            where=str(calls[0].place),
            change=line_of(scheduler),
            repair=f'ReduceLROnPlateau(optimizer, mode="{better}")',
        )


def argument_of(code: str) -> str:
    """The name of what ``scheduler.step(...)`` is given, as its last part; empty where it is computed there."""
    try:
        tree = ast.parse(code.strip())
    except SyntaxError:
        return ""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n.func) == "step"]
    given = [*calls[0].args, *(k.value for k in calls[0].keywords)] if calls else []
    return _name(given[0]) if len(given) == 1 else ""


def _name(value: ast.expr) -> str:
    if isinstance(value, ast.Call):
        if _called(value.func) in ("float", "mean") and len(value.args) == 1:
            return _name(value.args[0])
        own = isinstance(value.func, ast.Attribute) and value.func.attr in _PLAIN and not value.args
        return _name(value.func.value) if own and isinstance(value.func, ast.Attribute) else ""
    if isinstance(value, ast.Subscript):
        key = value.slice
        return str(key.value) if isinstance(key, ast.Constant) and isinstance(key.value, str) else _name(value.value)
    if isinstance(value, ast.Attribute) and value.attr in _PLAIN:
        return _name(value.value)
    return _called(value)


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def direction(name: str) -> str:
    """ "max" or "min" where the words of a name say so, empty where they say nothing or both."""
    parts = re.findall(r"[A-Za-z0-9]+", name)
    words = {w.lower() for part in parts for w in (part, *re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*", part))}
    if words & _TURNED or bool(words & RISES) == bool(words & FALLS):
        return ""
    return "max" if words & RISES else "min"
