"""The search for the smallest composition."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_trainloop.instruments.compositions.search import of_rows, smallest


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


def test_it_is_the_same_each_time_but_for_hypothesis_own_seed():
    def asked(**given):
        return searched(of_rows(range(8)), lambda c: sum(c.rows) % 5 == 3, **given)[1]

    assert asked() == asked()
    assert asked() != asked(hypothesis_seed="7")


def test_no_composition_is_asked_twice_or_after_its_steps_are_spent():
    found, asked = searched(of_rows(range(8)), lambda c: False)
    assert found is None
    assert len(asked) == len(set(asked)) == 16
