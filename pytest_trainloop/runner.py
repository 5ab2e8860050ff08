"""Choose checks, gate them by what a loop offers, run one. ``check_loop`` does the battery without pytest.

Interface draft (bodies under work).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pytest_trainloop.finding import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How loops are judged: ``seed`` for every build and run, ``seconds`` one run of ``fit`` may take, ``device``."""

    seed: int = 0
    seconds: float = 120.0
    device: str = "auto"


class Subject:
    """One loop under judgement: the evidence made for it so far, shared by all its checks.

    ``make`` builds a fresh loop when called with knob keywords (``make()``, ``make(accumulate=4)``). ``knobs`` maps the plugin's knob names to the
    user's parameter names, with their defaults. Holds records only between checks: ``bind`` gives it the make of the item at hand.
    """

    def __init__(self, name: str, make: Callable[..., Any], *, settings: Settings, knobs: Mapping[str, str] | None = None) -> None: ...

    def bind(self, make: Callable[..., Any]) -> None: ...

    def run_check(self, name: str, *, options: Mapping[str, Any] | None = None, reporter: str = "") -> Result:
        """Never raises for a user's fault; KeyboardInterrupt passes through. Raises errors.UsageError only for a misuse of the face
        (returned None, shared model ...); the second check that meets the same broken builder / raising fit gets 'skipped' naming ``reporter`` of the first."""
        raise NotImplementedError


def check_loop(make: Callable[..., Any], *, only=None, skip=None, xfail=None, options=None, knobs=None, seed=0, seconds=120.0, strict=False, raises=True) -> Any:
    """The battery without pytest. Returns report.Report (str() is the closing section); raises CheckFailed with the failure texts."""


@contextmanager
def observe(**settings: Any) -> Iterator[Any]:
    """Watch any training code; the yielded Observation has .check(*names) -> list[Result], raising CheckFailed."""
    yield
