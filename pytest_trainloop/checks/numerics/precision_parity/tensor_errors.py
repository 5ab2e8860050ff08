"""The error of the gradient at each parameter, beside what rounding explains of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.numerics.precision_parity.expected_error import unit_roundoff
from pytest_trainloop.checks.numerics.precision_parity.first_gradient import distance, first_gradient

if TYPE_CHECKING:
    from pytest_trainloop.checks.numerics.precision_parity.runs import LowPrecisionRuns
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class TensorError:
    """Of one parameter's gradient, relative to its length in float64."""

    measured: float
    """Infinite where an entry is not finite."""
    explained: float
    lost: float
    """The share of entries that are not finite."""


class TensorErrors:
    """Of the runs that ``precision_parity`` reported; none where it reported none."""

    def __init__(self, _evidence: Evidence) -> None:
        self.runs: LowPrecisionRuns | None = None

    def read(self) -> dict[str, TensorError]:
        """By parameter. Makes one further run, in float64 with products rounded as in low precision."""
        if self.runs is None or self.runs.low is None:
            return {}
        reference = self.runs.reference
        expected, got = first_gradient(reference), first_gradient(self.runs.record, reference)
        rounded, unit = first_gradient(self.runs.rounded(None)), unit_roundoff(self.runs.low)
        found = {}
        for name in expected.keys() & got.keys() & rounded.keys():
            one = {name: expected[name]}
            found[name] = TensorError(
                distance(one, {name: got[name]}),
                max(unit, distance(one, {name: rounded[name]})),
                1 - float(got[name].isfinite().double().mean()),
            )
        return {name: found[name] for name in expected if name in found}
