"""The loop with its gradient scaler enabled, where it is disabled as it is: in float16 by the knob ``precision``, and
with a scaler for the device that the parameters are on (torch disables one for CUDA where there is none)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.runs.scalers import scalers_built_with

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

HALF = "fp16"


class EnabledScaler:
    """The part of ``Evidence`` that ``grad_scaler`` asks, for the loop in this other form."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        knob, plan = evidence.knobs.get("precision"), evidence.plan()
        device = next((p.device for p in evidence.run().parameters), "cpu").partition(":")[0]
        knobs = plan.knobs if knob is None else {**plan.knobs, knob: HALF}
        self.how = "with a scaler for this device" if knob is None else f"with {knob}={HALF!r}"
        self._plan = replace(plan, knobs=knobs, around=lambda: scalers_built_with(device=device), may_raise=True)
        self._record = self._made()

    def _made(self) -> Record:
        """Raises ``CannotDecide`` where the loop cannot be run so."""
        try:
            record = self._evidence.rerun(self._plan)
        except (UserCodeError, UsageError) as refused:
            raise CannotDecide(f"{self.how} {refused}") from refused
        if record.raised is not None and not self.enabled_in(record):
            raise CannotDecide(f"{self.how} the loop raises {record.raised.summary}")
        return record

    @staticmethod
    def enabled_in(record: Record) -> bool:
        return any(call.enabled for call in record.scaler_calls())

    def run(self) -> Record:
        return self._record

    def plan(self) -> RunPlan:
        return self._plan

    def rerun(self, plan: RunPlan | None = None, /, **changes: Any) -> Record:
        return self._evidence.rerun(self._plan if plan is None else plan, **changes)
