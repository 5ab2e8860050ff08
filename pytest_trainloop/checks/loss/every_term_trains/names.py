"""What a line of the project's calls the value that it computes."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.dead_values import covers, reads, statement_at
from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.recording.source import place_of

if TYPE_CHECKING:
    from pytest_trainloop.recording.events import Site

_TERM = frozenset(
    """loss losses penalty penalties reg regularizer regulariser regularization regularisation kl kld nll bce aux
    auxiliary commit commitment commitloss elbo cost objective smoothness sparsity tv perceptual distill distillation
    consistency""".split()
)
_EITHER = frozenset(
    """dice jaccard tversky focal iou giou diou ciou entropy divergence contrastive triplet margin hinge recon
    reconstruction cycle identity gp ortho orthogonality mse l ce energy constraint barrier bonus wasserstein mmd
    diversity alignment uniformity""".split()
)
_MEASURE = frozenset(
    """metric metrics acc accuracy mae mape psnr ssim log logs logged logging val valid validation eval evaluation test
    monitor debug info stat stats report running avg average best ema norm total sum history display print raw
    unscaled detached""".split()
)


def is_term(name: str) -> bool:
    """Whether a name is one of a part of a loss, and none of a measure that is only looked at."""
    words = words_of(name)
    return bool(words & _TERM or any(w.endswith("loss") for w in words)) and not words & _MEASURE


def is_part(name: str) -> bool:
    """Whether a name is also one of a measure that is minimised as often as it is looked at."""
    return is_term(name) or bool(words_of(name) & _EITHER and not words_of(name) & _MEASURE)


def words_of(name: str) -> frozenset[str]:
    """The words of a name, in lower case, without numbers."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return frozenset(part.lower() for part in parts)


def name_at(site: Site) -> str:
    """The name, attribute or key that the value of a call site is assigned to; of one that is returned, that of the
    caller, else of the function."""
    for filename, line in site:
        found = statement_at(filename, line)
        if found is None:
            return ""
        statement, _, function = found
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            return _key_of(statement.value, line) or _named(target)
        if not isinstance(statement, ast.Return):
            return ""
        if key := _key_of(statement.value, line):
            return key
        if function is not None and (words_of(function.name) & _TERM or "loss" in function.name):
            return function.name
    return ""


def is_python_number(site: Site) -> bool:
    """Whether the line of a site assigns the value as a number of Python's: ``kl = (...).mean().item()``."""
    found = statement_at(*site[0]) if site else None
    value = getattr(found[0], "value", None) if found is not None else None
    called = value.func if isinstance(value, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", "")) in ("item", "float")


def loops_over(site: Site) -> tuple[str, int, str] | None:
    """Where a site assigns plain names in the body of a loop that does not read them afterwards, but to give them other
    names: the name that holds the value behind the loop, the line of the loop, and that of the last assignment. A line
    that returns the value, alone or among others, passes the question on to its caller."""
    for filename, line in site:
        found = statement_at(filename, line)
        if found is not None and isinstance(found[0], ast.Return):
            continue
        nodes = ast.walk(syntax_of(filename))
        loops = [n for n in nodes if isinstance(n, (ast.For, ast.While)) and covers(n, line)]
        for loop in sorted(loops, key=lambda n: -n.lineno):
            for statement in loop.body:
                if covers(statement, line):
                    left = _left_behind(loop, statement)
                    return None if left is None else (left[0], loop.lineno, str(place_of(filename, left[1])))
        return None
    return None


def _left_behind(loop: ast.For | ast.While, statement: ast.stmt) -> tuple[str, int] | None:
    """The name that an assignment in the body of a loop leaves its value in, if nothing else of the body reads it, and
    the line of the last assignment."""
    names = _plain_names(statement)
    if not names:
        return None
    last, line = names[0], statement.lineno
    others = [s for s in loop.body if s is not statement]
    for other in loop.body[loop.body.index(statement) + 1 :]:
        renamed = _plain_names(other)
        if isinstance(other, ast.Assign) and isinstance(other.value, ast.Name) and other.value.id in names and renamed:
            others.remove(other)
            last, line = renamed[0], other.lineno
            names += renamed
    return None if any(reads(s, name) for s in (statement, *others) for name in names) else (last, line)


def _plain_names(statement: ast.stmt) -> list[str]:
    """The names that a statement assigns to, where it assigns to nothing else."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target = statement.targets[0]
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    return names if len(names) == len(parts) else []


def _named(target: ast.expr) -> str:
    if isinstance(target, ast.Name):
        return target.id
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return ""


def _key_of(value: ast.expr | None, line: int) -> str:
    """The key of a dict display whose value alone is on a line."""
    if not isinstance(value, ast.Dict):
        return ""
    entries = zip(value.keys, value.values, strict=True)
    keys = [str(k.value) for k, entry in entries if isinstance(k, ast.Constant) and covers(entry, line)]
    return keys[0] if len(keys) == 1 else ""
