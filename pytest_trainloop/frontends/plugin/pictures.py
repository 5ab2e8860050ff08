"""What ``--trainloop-report`` draws: the pictures of each loop travel on the report of its card's item, as plain data.

They stay off the item, where JUnit XML would write them out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pytest_trainloop.views.pictures.picture import Picture

PROPERTY = "trainloop-pictures"
"""The key in the user properties of a report; the value is one JSON string."""

_TAKEN = pytest.StashKey[str]()


def wanted(config: pytest.Config) -> bool:
    """Whether this session draws."""
    return bool(config.getoption("trainloop") and config.getoption("trainloop_report"))


def note(item: pytest.Item, loop: str, pictures: Sequence[Picture]) -> None:
    """Keep the pictures of a loop for the report of this item."""
    item.stash[_TAKEN] = json.dumps({"loop": loop, "pictures": [picture.to_json() for picture in pictures]})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and (taken := item.stash.get(_TAKEN, None)) is not None:
        del item.stash[_TAKEN]
        report.user_properties = [*report.user_properties, (PROPERTY, taken)]
    return report


class Pictures:
    """The pictures of a session, by loop."""

    def __init__(self) -> None:
        self._taken: dict[str, list[dict[str, Any]]] = {}

    def note(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == PROPERTY:
                taken = json.loads(str(value))
                self._taken[taken["loop"]] = taken["pictures"]

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """By loop, the pictures in the order of the report."""
        return dict(sorted(self._taken.items()))
