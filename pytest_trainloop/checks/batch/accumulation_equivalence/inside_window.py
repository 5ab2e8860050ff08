"""What a loop does with every micro-batch besides its backward pass, named where leaving it out settles the difference.

No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pytest_trainloop.checks.batch.accumulation_equivalence.schedule_units import in_other_units
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import Backward, GradWrite, SchedulerStep, Step
from pytest_trainloop.wording import share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation
    from pytest_trainloop.checks.batch.accumulation_equivalence.left_out import Kind, LeftOut
    from pytest_trainloop.checks.batch.accumulation_equivalence.split import Split
    from pytest_trainloop.recording.events import Event
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

_CLAMPS = ("clamp", "clip")
_SCALES = ("mul", "div")
_ORDER: tuple[Kind, ...] = ("writes", "average", "weights", "rates", "statistic", "hooks")

RULED_OUT = "a clip, a schedule of the rates, an average or target network, a statistic, hooks"


class Settled(NamedTuple):
    """That a difference is explained, by what, and the finding; None where it is no fault."""

    kind: Kind
    finding: Finding | None


class _Words(NamedTuple):
    cause: str
    summary: str
    without: str
    culprit: str


_WORDS: dict[Kind, _Words] = {
    "average": _Words(
        "averaged_inside_window",
        "an average or target network follows the weights with every micro-batch, {k} times for each step",
        "with it moved once for each step only",
        "the average",
    ),
    "weights": _Words(
        "changed_inside_window",
        "weights are changed between the micro-batches of a window, outside of the optimizer",
        "with these changes made once for each step only",
        "weights",
    ),
    "rates": _Words(
        "scheduled_inside_window",
        "the schedule moves on with every micro-batch, {k} times for each step",
        "with the optimizer's options held as they were at the start",
        "scheduler.step()",
    ),
    "statistic": _Words(
        "statistic_inside_window",
        "a running statistic is updated with every micro-batch, {k} times for each step",
        "with it updated once for each step only",
        "the statistic",
    ),
    "hooks": _Words(
        "changed_inside_window",
        "a hook on the parameters changes the gradient of every micro-batch, not of their sum",
        "with these hooks left out",
        "register_hook()",
    ),
}


def settled(evidence: Evidence, made: Accumulation, split: Split) -> Settled | None:
    """The first thing without which windows and one batch agree; None where there is none."""
    record = made.many(split)
    for kind in _ORDER:
        if not _may_be(kind, record, split):
            continue
        left = made.agrees_without(split, kind)
        if left is None:
            continue
        if kind == "statistic" and not left.by_loop:
            return Settled(kind, None)  # what layers keep of each forward pass, as batch norms do
        if kind == "rates" and in_other_units(evidence, made, split, inside=left.by_loop):
            return Settled(kind, None)  # with the rates held equal, windows and one batch agree
        if kind == "rates" and not left.by_loop:
            return None  # rates that are to scale with the window, not moved inside it
        if kind == "rates" and not any(_inside(record, split, s.at) for s in record.of(SchedulerStep)):
            return Settled(kind, _written_by_hand(evidence, split))
        return Settled(kind, _finding(kind, split, record, left))
    return None


def _written_by_hand(evidence: Evidence, split: Split) -> Finding:
    """Of rates that lines of the loop write, and no scheduler: what it counts in batches is its own choice."""
    from pytest_trainloop.tracing.rate_writes import RateWrites

    writes = evidence.shared(RateWrites.of)
    line = next(filter(None, map(writes.line, ("lr", "momentum", "betas", "weight_decay"))), "")
    return Finding(
        cause="scheduled_inside_window",
        level="advice",
        summary="the loop writes the optimizer's learning rate or momentum with every micro-batch, "
        f"{split.accumulate} times for each step",
        measured=f"after the last step weights differ by {share(split.updates)} of how far they moved, "
        f"{split.precision}",
        shown_by="with the optimizer's options held as they were at the start, windows and one batch give the same "
        "gradients and the same weights",
        culprits=("optimizer.param_groups",),
        where=line or str(split.step_place),
        repair="right if it is meant to count batches; if it is meant to count optimizer steps, run this line once a "
        "window, where optimizer.step() is called",
    )


def _may_be(kind: Kind, record: Record, split: Split) -> bool:
    """Whether the run over micro-batches shows such a change inside a window; statistics and hooks leave no trace."""
    if kind == "writes":
        return any(_writes(record, split))
    if kind in ("average", "weights"):
        between = [m for m in record.moves if m.by is None and _inside(record, split, m.at)]
        trained = {i for i in record.held if record.parameters[i].requires_grad}
        return any((i in trained) == (kind == "weights") for m in between for i in m.parameters)
    return kind != "rates" or split.windows[0].difference <= split.bound


def _inside(record: Record, split: Split, at: int) -> bool:
    """Whether a moment lies between two backward passes of one window."""
    before = [e for e in _marks(record, split) if e.at < at]
    after = [e for e in _marks(record, split) if e.at >= at]
    return bool(before and after) and isinstance(before[-1], Backward) and isinstance(after[0], Backward)


def _marks(record: Record, split: Split) -> list[Event]:
    """The optimizer's steps and the backward passes that bring it gradients, in order."""
    mine = set(record.optimizers[split.optimizer].parameters)
    return [
        e
        for e in record.events
        if (isinstance(e, Step) and e.optimizer == split.optimizer and not e.nested)
        or (isinstance(e, Backward) and mine & set(e.arrivals))
    ]


def _writes(record: Record, split: Split) -> Iterator[GradWrite]:
    for write in record.of(GradWrite):
        if write.how not in ("none", "zero") and _inside(record, split, write.at):
            yield write


def _finding(kind: Kind, split: Split, record: Record, left: LeftOut) -> Finding:
    write = next(_writes(record, split), None) if kind == "writes" else None
    words = _of_write(write) if write is not None else _WORDS[kind]
    place = (write.place if write else None) or left.place
    if kind == "rates":
        place = next((s.place for s in record.of(SchedulerStep) if _inside(record, split, s.at)), None)
    window = next((w for w in split.windows if w.difference > split.bound), split.windows[0])
    inner = split.accumulate
    return Finding(
        cause=words.cause,
        level="advice" if kind == "average" and not left.by_loop else "fault",
        summary=words.summary.format(k=inner),
        measured=(
            f"|g_{inner}| / |g_1| = {window.ratio:.4g} in a window of {inner} micro-batches, after the last step "
            f"weights differ by {share(split.updates)} of how far they moved, {split.precision}"
        ),
        shown_by=f"{words.without}, windows and one batch give the same gradients and the same weights",
        culprits=(words.culprit,),
        where=str(place or split.step_place),
    )


def _of_write(write: GradWrite) -> _Words:
    name = write.by.strip("_")
    clips = write.how == "clipped" or any(word in name for word in (*_CLAMPS, *_SCALES))
    if clips:
        return _Words(
            "clipped_inside_window",
            "gradients are clipped with every micro-batch, and not once for each step",
            "with gradients clipped after the last micro-batch of a window only",
            write.by,
        )
    return _Words(
        "changed_inside_window",
        f"gradients are changed with every micro-batch ({write.by}), and not once for each step",
        "with gradients changed after the last micro-batch of a window only",
        write.by,
    )
