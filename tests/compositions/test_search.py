"""The search for the smallest composition."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pytest_trainloop.compositions.search import in_parts, of_rows, smallest
from pytest_trainloop.errors import CannotDecide


@dataclass
class Steps:
    """Evidence that counts the steps of what is asked, one each."""

    seed: int = 0
    hypothesis_seed: str = ""
    own_steps: int = 0


def searched(strategy, shows, **given):
    evidence, asked = Steps(**given), []

    def asking(composition):
        evidence.own_steps += 1
        asked.append(composition)
        return shows(composition)

    return smallest(strategy, asking, evidence=evidence), asked


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("strategy", "shows", "text"),
    [
        (of_rows(range(8)), lambda c: True, "row [0]"),
        (of_rows(range(8), least=2), lambda c: True, "rows [0, 1]"),
        (of_rows((3, 5, 7)), lambda c: 7 in c.rows, "row [7]"),
        (of_rows(range(4)), lambda c: {2, 3} <= {*c.rows}, "rows [2, 3]"),
        (in_parts(range(8), 3, most=2), lambda c: True, "rows [0] | [1] | [2]"),
        (in_parts(range(8), 2, most=4), lambda c: c.parts[0] > 1, "rows [0, 1] | [2, 3]"),
        (in_parts(range(4), 2, most=1), lambda c: c.rows[1] == 3, "rows [0] | [3]"),
    ],
)
def test_it_ends_at_the_smallest(strategy, shows, text, seed):
    assert str(searched(strategy, shows, seed=seed)[0]) == text


def test_it_is_the_same_each_time_but_for_hypothesis_own_seed():
    def asked(**given):
        return searched(of_rows(range(8)), lambda c: sum(c.rows) % 5 == 3, **given)[1]

    assert asked() == asked()
    assert asked() != asked(hypothesis_seed="7")


def test_no_composition_is_asked_twice_or_after_its_steps_are_spent():
    found, asked = searched(of_rows(range(8)), lambda c: False)
    assert found is None
    assert len(asked) == len(set(asked)) == 16


def test_what_cannot_be_judged_shows_nothing():
    def shows(composition):
        if len(composition.rows) < 2:
            raise CannotDecide("too few rows")
        return True

    assert len(searched(of_rows(range(8)), shows)[0].rows) == 2
