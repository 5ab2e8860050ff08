"""The summary of a CI job in Markdown."""

from __future__ import annotations

import pytest

from pytest_trainloop.core.report.entry import entries_of
from pytest_trainloop.core.report.jobsummary import LIMIT, markdown
from tests.helpers.report_data import plain, raised, report, result, stale


@pytest.fixture
def summary(told, monkeypatch):
    for name in ("SERVER_URL", "REPOSITORY", "SHA"):
        monkeypatch.delenv(f"GITHUB_{name}", raising=False)

    def made(loops, **given):
        document = report(loops)
        return markdown(entries_of(document), told(document), **given)

    return made


FOUND = {
    "t::a": [result(stale()), result(plain("overfit_one_batch", "x")), result(plain("finite", "b", level="advice"))],
    "t::b": [result(check="finite"), result(check="causality", outcome="skipped", reason="give padding=")],
    "t::c": [raised()],
}

SUMMARY = """\
## Training loops: 1 fault and 1 error; 2 of 3 loops fail

### To repair

**2 weights are stepped with old gradients** (`step_order:not_zeroed`)

`t::a` at `train.py:4`; `overfit_one_batch` fails for it

```text
measured   11 of 12 steps
cause      not_zeroed: a step uses, bit for bit, gradients that an earlier step has used; or a gradient that is \
not finite stays in .grad, and all later ones are added to it
shown by   they are bit-identical
seen at    train.py:5   optimizer.step()
change     train.py:4   loss.backward()
repair     optimizer.zero_grad() before this line
```

**fit raised ValueError: no data** (`loop not judged`)

`t::c` at `test_train.py:4`

### Advice

<details><summary><b>b was found</b> (<code>finite:b</code>)</summary>

`t::a` at `test_train.py:4`

```text
cause      b
```

</details>

### Loops

| loop | checks |
|---|---|
| `t::a` | 2 failed, 1 passed, 1 advice; 0.0 s, 0 optimizer steps |
| `t::c` | 1 error; 0.0 s, 0 optimizer steps |
| `t::b` | 1 passed, 1 skipped; 0.0 s, 0 optimizer steps |

<details><summary>Not decided</summary>

- `causality`: give padding= (`t::b`)

</details>
"""


def test_failures_come_first_then_advice_loops_and_what_is_open(summary):
    assert summary(FOUND) == SUMMARY


def test_many_checks_with_one_reason_are_one_point(summary):
    skipped = [result(check=name, outcome="skipped", reason="fit raised ValueError: bad") for name in "bcdefgh"]
    text = summary({"t::c": [raised(), *skipped], "t::d": [result(check="a")]})
    assert "\n- 7 checks: fit raised ValueError: bad (`t::c`)\n" in text


def test_the_line_is_a_link_to_the_commit(summary, monkeypatch):
    for name, value in (("SERVER_URL", "https://github.com"), ("REPOSITORY", "me/ml"), ("SHA", "abc")):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    assert "[`train.py:4`](https://github.com/me/ml/blob/abc/train.py#L4)" in summary(FOUND)


def test_without_a_fault_it_says_so(summary):
    text = summary({"t::b": FOUND["t::b"]})
    assert text.startswith("## Training loops: no fault in 1 loop\n\n### Loops\n")


def test_where_nothing_was_checked_the_reason_stands_on_top(summary):
    assert summary({}, nothing="the session was *interrupted*").startswith(
        "## Training loops: nothing was checked\n\nthe session was \\*interrupted\\*\n"
    )


def test_a_fault_that_the_project_expects_is_none_to_repair(summary):
    text = summary({"t::a": [result(stale(), outcome="xfailed", reason="issue 12")]})
    assert text.startswith("## Training loops: no fault in 1 loop\n")
    assert "1 xfailed" in text


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a|b`c", "x](http://evil)", "**bold** _it_", "# no heading"]
)
def test_names_and_messages_are_text(summary, name):
    finding = plain("finite", "a", summary=name, measured=f"```\n{name}")
    text = summary({f"t::{name}": [result(finding)]})
    outside = text.replace(f"````text\n{name}\n", "").replace(f"           {name}\n", "")
    assert "````text\n" in text  # a fence that the message does not close
    assert "\n# " not in outside
    for line in outside.splitlines():
        prose = "".join(line.split("`")[::2])  # a span of code shows what it holds
        assert "<script" not in prose
        assert "**bold**" not in prose
    row = next(line for line in text.splitlines() if line.startswith("| ") and "failed" in line)
    assert row.replace(r"\|", "").count("|") == 3


def test_it_stays_below_the_limit_and_says_that_it_was_cut(summary):
    loops = {f"t::{i}": [result(stale(measured="ä" * 7000, culprits=(str(i),)))] for i in range(200)}
    text = summary(loops)
    assert len(text.encode()) <= LIMIT
    assert text.endswith("the log of this step has the rest.*\n")
    assert text.count("```") % 2 == 0
    assert len(summary(loops, room=5000).encode()) <= 5000
