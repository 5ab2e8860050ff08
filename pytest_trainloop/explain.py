"""The table of checks and their rule pages, from the check files themselves. No torch, no pytest."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pytest_trainloop import registry
from pytest_trainloop.errors import UsageError
from pytest_trainloop.knobs import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIDTH = 100


def table() -> str:
    """Every check with its family and what it holds, in causal order: those of loops, then those of losses."""
    return f"{_rows('check', registry.of('loop'))}\n{_rows('check of a loss', registry.of('loss'))}".rstrip("\n") + "\n"


def _rows(title: str, known: Mapping[str, registry.Check]) -> str:
    if not known:
        return ""
    rows = [(title, "family", "holds that"), *((c.name, c.family, c.headline) for c in known.values())]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "".join(f"{name.ljust(widths[0])}  {family.ljust(widths[1])}  {text}\n" for name, family, text in rows)


def page(name: str) -> str:
    """The rule page of a check and the causes it tells apart; of ``check:cause`` that cause first."""
    known = registry.registered()
    check, colon, cause = name.partition(":")
    if check not in known:
        raise UsageError(f"there is no check {check!r}; {nearest(check, known)}")
    found = known[check]
    if not colon:
        return f"{check} ({found.family})\n\n{found.page.strip()}\n\n{_causes(found)}"
    if cause not in found.causes:
        raise UsageError(f"{check} names no cause {cause!r}; {nearest(cause, found.causes)}")
    return f"{check}:{cause}\n{_indented(found.proofs[cause])}\n{page(check)}"


def _causes(check: registry.Check) -> str:
    return "Causes\n" + "".join(f"  {cause}\n{_indented(proof)}" for cause, proof in check.proofs.items())


def _indented(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ") + "\n"
