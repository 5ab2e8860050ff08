"""A launch that did not come to its end: a rank that raised, or one that waits for ever."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.scale.distributed_equivalence.diagnosis import Diagnosis
from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
from pytest_trainloop.errors import CannotDecide, UserCodeError
from pytest_trainloop.finding import UserError
from pytest_trainloop.ranks.facts import LOST
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from pytest_trainloop.ranks.facts import Hang, Launch, Other
    from pytest_trainloop.recording.events import Raised

_UNREDUCED = "Expected to have finished reduction in the prior iteration"
"""How DistributedDataParallel begins what it says of parameters without a gradient."""

_ELSEWHERE = re.compile(
    r"SyncBatchNorm|expected input tensor to be on (?:a )?GPU|not compiled with CUDA|no CUDA|No CUDA|NVIDIA driver|nccl"
    r"|NCCL|No backend type associated with device type|cuda",
)
"""What libraries say of devices that the machine does not have."""


def dids_of(launch: Launch) -> list[Did]:
    """What each rank did. Raises what ended one, where it is no fault of the loop's."""
    if launch.raised is not None and (what := launch.raised.raised) is not None:
        raise RuntimeError(f"rank {launch.raised.number}: {what.summary}")  # those of the loop are in its record
    made = [rank.value for rank in launch]
    for rank, did in enumerate(made):
        if isinstance(did, Did) and did.refused is not None:
            try:
                did.require()
            except UserCodeError as refusal:
                error = refusal.error
            raise _own_error(launch, rank, error, error.summary)
    return [did if isinstance(did, Did) else Did() for did in made]


def of_launch(launch: Launch) -> Diagnosis | None:
    """Why the ranks did not come to their end; None where they did.

    Raises ``CannotDecide`` where that is no fault of the loop's, and ``UserCodeError`` where it raised by itself.
    """
    dids = dids_of(launch)
    # What a rank raises that waited for another which is gone follows from that, as it does where it was ended.
    made = [
        (r, d.record)
        for r, d in enumerate(dids)
        if d.record is not None and not (r in launch.waiting and _of_lost_rank(d.record.raised))
    ]
    raised = [(r, record.raised) for r, record in made if record.raised]
    unreduced = [(r, what) for r, what in raised if _UNREDUCED in f"{what.summary} {what.message}"]
    if unreduced:
        return _unused(dids, *unreduced[0])
    if raised:
        rank, what = raised[0]
        error = UserError(stage="fit", summary=what.summary, traceback=what.traceback)
        raise _own_error(launch, rank, error, f"{what.summary} {what.message}")
    if launch.hang is not None:
        if any(not record.ended for _, record in made):
            raise CannotDecide(
                "a rank made all the steps that it was to make, and another was in the middle of one: the ranks step "
                "unequally often"
            )
        return _waits(launch.hang)
    ended = next((r for r in launch if r.ended), None)
    if ended is not None:
        raise CannotDecide(f"the process of rank {ended.number} of {len(launch)} ended early: {ended.ended}")
    return None


def _of_lost_rank(what: Raised | None) -> bool:
    """Whether gloo raised it, since another process is gone."""
    return what is not None and LOST in f"{what.summary} {what.message}"


def _own_error(launch: Launch, rank: int, error: UserError, text: str) -> Exception:
    """What the project's code raised in a rank: of this check alone, since the others ask for no ranks."""
    ranks = f"with ranks={len(launch)}"
    if _ELSEWHERE.search(text):
        return CannotDecide(f"{error.stage} raised {error.summary} {ranks}: it needs a device that is not here")
    return UserCodeError(replace(error, stage=f"{error.stage} {ranks} (rank {rank})"), one_check=True)


def _unused(dids: list[Did], rank: int, what: Raised) -> Diagnosis:
    record = dids[rank].require()
    first = next((b for b in record.backwards()), None)
    without = tuple(
        plain(p.name)
        for p in record.parameters
        if p.declared and p.requires_grad and first is not None and not first.arrivals.get(p.index)
    )
    late = dids[rank].seen.wrapped.late
    if late:
        return Diagnosis(
            "parameters_not_in_wrapper",
            f"{some(late, most=3)} came into the model after it was wrapped, in place of parameters that "
            "DistributedDataParallel still waits for",
            f"torch raises in the next forward pass: {what.kind}: {_UNREDUCED}",
            culprits=late,
            where=str(what.place),
        )
    names = some(without, most=3) if without else "some parameters"
    return Diagnosis(
        "unused_parameters",
        f"{names} {'get' if len(without) != 1 else 'gets'} no gradient in a backward pass, so that "
        "DistributedDataParallel never finishes reducing: no rank gets the gradient of the others",
        f"torch raises in the next forward pass: {what.kind}: {_UNREDUCED}",
        culprits=without,
        where=str(what.place),
    )


def _waits(hang: Hang) -> Diagnosis:
    others = "; ".join(_other(other, hang) for other in hang.others)
    return Diagnosis(
        "one_rank_waits",
        f"rank {hang.rank} waits for ever in {hang.collective.kind}: {others}",
        f"{hang.collective} of rank {hang.rank} at {hang.line or 'a line that is not known'}, step "
        f"{hang.collective.steps}; seen from the calls of each rank, not from a clock",
        culprits=(hang.collective.kind,),
        where=str(hang.line),
    )


def _other(other: Other, hang: Hang) -> str:
    number, how, last = other.number, other.how, other.last
    at = f" at {last.place}" if last is not None and last.place.file else ""
    kind = last.kind if last is not None else "another"
    if how == "waited" and hang.different and last is not None and at:
        if last.place != hang.line:
            own = "a " if kind == hang.collective.kind else ""
            return f"rank {number} is at another line, and waits in {own}{kind} there:{at.removeprefix(' at')}"
        return f"rank {number} waits in {kind} of other shapes{at}"
    if how == "waited":
        return f"rank {number} waits in {kind}{at}"
    known = f" (last in {kind}{at})" if at else ""
    return f"rank {number} has come to its end without it{known}" if how == "left" else f"rank {number} {how}{known}"
