"""Looking at what a strategy draws."""

from __future__ import annotations

from hypothesis import HealthCheck, find, given, settings

REPEATABLE = settings(
    max_examples=300, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


def smallest(strategy, condition=lambda value: True):
    """The example to which a strategy shrinks where something holds; no example at all is an error."""
    return find(strategy, condition, settings=REPEATABLE)


def drawn(strategy, count=100):
    """Examples, the same ones each time."""
    found = []

    @settings(REPEATABLE, max_examples=count)
    @given(strategy)
    def note(value):
        found.append(value)

    note()
    return found
