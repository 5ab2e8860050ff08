"""The card as text, its diff against a stored one, and its numbers."""

from __future__ import annotations

import pytest

from pytest_trainloop.views.loop_facts.page import Card, Line
from pytest_trainloop.views.loop_facts.words import two

LINES = (
    Line(label="model", text="9 weights in 2 tensors, 0 frozen", where="train.py:7"),
    Line(label="optimizer", text="SGD, 12 steps", where="train.py:8"),
    Line(label="  group 0", text="rate 0 *", where="train.py:8", odd=True),
    Line(label="one step", text="zero(11) forward(12) step G(13)   the same in 12 of 12 windows", where="train.py:13"),
    Line(label="checkpoint", text="not looked at: resume_equivalence was not run", seen=False),
)

PAGE = """\
model       9 weights in 2 tensors, 0 frozen   train.py:7
optimizer   SGD, 12 steps   train.py:8
  group 0   rate 0 *   train.py:8
one step    zero(11) forward(12) step G(13)   the same in 12 of 12 windows   train.py:13
checkpoint  not looked at: resume_equivalence was not run"""


def card(**changed: str) -> Card:
    """The lines with other texts, by label."""
    return Card(
        tuple(
            Line(label=line.label, text=changed.get(line.label.strip().replace(" ", "_"), line.text), where=line.where)
            if line.seen
            else line
            for line in LINES
        )
    )


def test_the_page_has_a_line_for_each_fact_which_ends_in_its_source_line():
    assert str(Card(LINES)) == PAGE


def test_a_label_gives_its_lines():
    assert Card(LINES)["optimizer"] == "SGD, 12 steps   train.py:8\ngroup 0 rate 0 *"
    with pytest.raises(KeyError, match="loss"):
        Card(LINES)["loss"]


def test_json_and_back():
    made = Card(LINES)
    assert Card.from_json(made.to_json()) == made


def test_nothing_changes_where_only_line_numbers_move():
    moved = (
        PAGE.replace(":7", ":70").replace("(11)", "(111)").replace("G(13)", "G(model.py:113)").replace(":13", ":113")
    )
    assert Card(LINES).changes(moved) == []


def test_a_change_is_shown_with_the_line_around_it():
    assert card(optimizer="SGD, 6 steps").changes(PAGE) == [
        "--- stored",
        "+++ now",
        "@@ -1,3 +1,3 @@",
        " model       9 weights in 2 tensors, 0 frozen   train.py:7",
        "-optimizer   SGD, 12 steps   train.py:8",
        "+optimizer   SGD, 6 steps   train.py:8",
        "   group 0   rate 0 *   train.py:8",
    ]


@pytest.mark.parametrize("text", ["zero(11) forward(12) step D(13)   the same in 12 of 12 windows", "forward(12)"])
def test_another_call_is_a_change(text):
    assert card(one_step=text).changes(PAGE)


def test_a_number_in_parentheses_that_is_no_line_is_a_change():
    units = Card((Line(label="units", text="relu(48): 0 % dead"),))
    assert units.changes("units       relu(32): 0 % dead")


def test_what_was_not_looked_at_counts_as_it_is_stored():
    stored = PAGE.replace(
        "not looked at: resume_equivalence was not run", "not in it: scheduler *   train.py:30\n            RNG *"
    )
    assert card().changes(stored) == []
    assert card().text(stored) == stored


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.97, "0.97"),
        (0.00097, "9.7e-4"),
        (0.001, "0.001"),
        (9.96, "10"),
        (1234.0, "1,200"),
        (65536.0, "66,000"),
        (1.25e6, "1.2e6"),
        (1e-7, "1e-7"),
        (-0.5, "-0.5"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_two_digits(value, shown):
    assert two(value) == shown
