"""The texts of findings, as ``tests/texts/<check>.txt`` stores them: a block for each faulty loop of the pairs.

What a machine decides is left out: measured numbers, numbers of lines, and how many calls of a loss were tried. The
proof of a cause is on the page of its check. ``python scripts/verdicts.py run --own --store`` writes all texts again.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.report.text import finding_text

if TYPE_CHECKING:
    from collections.abc import Container

    from pytest_trainloop.core.report import Report

FOLDER = Path(__file__).parents[1] / "texts"

TORCH = "2.13."
"""Under other versions of torch some texts differ: they quote its messages."""

UNSTABLE = {
    "eps_of_zero_and_rows_without_gradient": "which gradients are exactly 0 depends on the processor",
    "state_that_cannot_be_pickled": "it quotes Python, whose 3.13 words it otherwise",
    "futures_with_graphs": "Python 3.11 counts a tensor more than 3.13",
}
"""Pairs without a stored text, and why."""

MEASURED = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)(?!\w)|\d+(?= ?%)|\d+ of \d+(?= examples\))")


def text_of(report: Report, pair: Any) -> str:
    """What a report shows of a pair's fault, without what a machine decides; nothing where that is not possible."""
    if not torch.__version__.startswith(TORCH) or pair.name in UNSTABLE:
        return ""
    of_pair = [f for r in report.results for f in r.findings if (f.check, f.cause) == (pair.check, pair.cause)]
    shown = (finding_text(f, {}) if f.level == "fault" else f"{f.level}\n{finding_text(f, {})}" for f in of_pair)
    lines = "\n\n".join(shown).split("\n")
    return "\n".join(_same_everywhere(line) for line in lines if not re.fullmatch(r" *[~^]+", line))


def _same_everywhere(line: str) -> str:
    line = re.sub(r"\bline \d+", "line #", re.sub(r"(?<=\.py):\d+|(?<=\")[^\s\"]+/site-packages/", "", line))
    if line.startswith(("seen at ", "change ")):
        return line
    code = line.startswith(("repair ", "do not ", " "))  # whose 0.9 and 1e-3 are to be written
    return MEASURED.sub(lambda n: n[0] if code and len(re.sub(r"^[-+.0]+|e.*|\.", "", n[0])) < 3 else "#", line)


def stored(check: str) -> dict[str, str]:
    """The stored texts of a check by the names of its pairs."""
    file = FOLDER / f"{check}.txt"
    blocks = re.split(r"^## ", file.read_text(encoding="utf-8") if file.exists() else "", flags=re.MULTILINE)[1:]
    return {name: text.strip("\n") for name, _, text in (block.partition("\n") for block in blocks)}


def store(pair: Any, text: str, known: Container[str]) -> None:
    """Put one text into its file, and leave out those of loops that are not known any more."""
    kept = {name: old for name, old in stored(pair.check).items() if name in known and name not in UNSTABLE}
    texts = {**kept, pair.name: text}
    FOLDER.mkdir(exist_ok=True)
    blocks = (f"## {name}\n{texts[name]}\n" for name in sorted(texts))
    (FOLDER / f"{pair.check}.txt").write_text("\n".join(blocks), encoding="utf-8")


def assert_stored(report: Report, pair: Any) -> None:
    """The text of the pair's fault is the stored one."""
    before, now = stored(pair.check).get(pair.name, ""), text_of(report, pair)
    diff = difflib.unified_diff(before.split("\n"), now.split("\n"), "stored", "now", lineterm="", n=0)
    command = f'python scripts/verdicts.py run --own --store -k "{pair.name}"'
    assert now in (before, ""), "\n".join([f"a text differs; if it is better: {command}", *diff])
