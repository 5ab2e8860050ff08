"""The property tests of docs/strategies.md: they pass on right code, and show the smallest failure of other."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.helpers.hypothesis_draws import REPEATABLE

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
COLLATOR, MODEL = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def samples():
    return [{"input_ids": ids} for ids in ([7, 3, 9], [4, 8, 2, 5, 6], [1, 9])]


def collate(rows, ignore=-100):
    texts = [torch.tensor(row["input_ids"]) for row in rows]
    ids = pad_sequence(texts, batch_first=True)
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, ignore)}


def labels_in_padding(rows):
    return collate(rows, ignore=0)


def batch():
    return collate(samples())


TABLE = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


def mean_of_tokens(input_ids, attention_mask, labels):
    mask = attention_mask[..., None]
    return (TABLE[input_ids] * mask).sum(1) / mask.sum(1)


def mean_of_positions(input_ids, attention_mask, labels):
    return TABLE[input_ids].mean(1)


def mean_over_rows(input_ids, attention_mask, labels):
    means = mean_of_tokens(input_ids, attention_mask, labels)
    return means - means.mean(0)


def of_page(monkeypatch, source, **project):
    """The test of a page, with these functions of the reader's project."""
    module = ModuleType("myproject")
    vars(module).update(project)
    monkeypatch.setitem(sys.modules, "myproject", module)
    scope: dict = {}
    exec(source, scope)
    return REPEATABLE(next(value for name, value in scope.items() if name.startswith("test_")))


def test_the_tests_of_the_page_pass(monkeypatch):
    of_page(monkeypatch, COLLATOR, collate=collate, samples=samples)()
    of_page(monkeypatch, MODEL, model=mean_of_tokens, batch=batch)()


@pytest.mark.parametrize(
    ("source", "project", "shown"),
    [
        (COLLATOR, {"collate": labels_in_padding, "samples": samples}, "rows=rows [0, 1]"),
        (MODEL, {"model": mean_over_rows, "batch": batch}, "rows=rows [0]"),
        (MODEL, {"model": mean_of_positions, "batch": batch}, "rows=rows [0]"),
        (MODEL, {"model": mean_of_positions, "batch": batch}, "padded=padding: "),
    ],
)
def test_a_failure_shows_the_smallest(monkeypatch, source, project, shown):
    with pytest.raises(AssertionError) as raised:
        of_page(monkeypatch, source, **project)()
    assert shown in "\n".join(raised.value.__notes__)


@pytest.mark.parametrize("source", [COLLATOR, MODEL])
def test_the_tests_are_short(source):
    assert len([line for line in source.splitlines() if line.strip()]) <= 10
