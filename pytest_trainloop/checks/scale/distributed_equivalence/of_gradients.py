"""What the gradients of the ranks on equal shares of the same rows prove."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.batches.own_data import require_given_data
from pytest_trainloop.checks.scale.distributed_equivalence.comparison import Comparison
from pytest_trainloop.checks.scale.distributed_equivalence.diagnosis import (
    Circumstances,
    Diagnosis,
    in_one_direction,
    of_weights,
)
from pytest_trainloop.checks.scale.distributed_equivalence.endings import dids_of
from pytest_trainloop.checks.scale.distributed_equivalence.own_batches import come_together, same_everywhere
from pytest_trainloop.checks.scale.distributed_equivalence.weighing import CLOSE, listed
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.comparison import Clips, Compared, Layout
    from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
    from pytest_trainloop.checks.scale.distributed_equivalence.weighing import Weighing
    from pytest_trainloop.ranks.facts import Launch
    from pytest_trainloop.runs.evidence import Evidence

OF_EACH_RANK = (
    *("never_synchronised", "wrapper_bypassed", "parameters_not_in_wrapper", "last_micro_batch_not_synchronised"),
    "norm_of_one_shard",
)
"""Causes that the gradients of the ranks prove by themselves, whatever one process gives."""


def judged(evidence: Evidence, world: int, own: Sequence[Did]) -> tuple[Compared, Diagnosis] | None:
    """The first comparison whose ranks differ from one process, and why; None where all agree. ``own`` is what the
    ranks did over the loop's own batches. Raises ``CannotDecide``."""
    require_given_data(evidence, "no rows can be shared out")
    window = evidence.shared(StepGradients.of).window
    for size in (1, 2) if "accumulate" in evidence.knobs else dict.fromkeys((window, 1)):
        made = Comparison.of(evidence, world, size)
        if made is None:
            continue  # too few rows
        compared = made.compared(_ended(made.launched, world))
        found = _Judge(made, compared, own).diagnosis()
        if found is not None:
            return compared, found
        if size == window > 1:
            return None
    if Comparison.of(evidence, world, 1) is None:
        raise CannotDecide(f"the batch has too few rows for {world} ranks: give a larger one", needs="a larger batch")
    return None


def _ended(launched: Launch, world: int) -> list[Did]:
    """What the ranks did. Raises ``CannotDecide`` where they did not come to their end on rows of ours."""
    dids = dids_of(launched)
    raised = next((d.record.raised for d in dids if d.record is not None and d.record.raised), None)
    if raised is not None:
        raise CannotDecide(f"fit raised {raised.summary} on a share of the rows with ranks={world}")
    if launched.hang is not None or any(d.record is None for d in dids):
        raise CannotDecide(
            f"on equal shares of the rows, with ranks={world}, the ranks wait for each other for ever, and over the "
            "loop's own batches they do not"
        )
    return dids


class _Judge:
    """One comparison, and the further runs that separate its causes."""

    def __init__(self, made: Comparison, compared: Compared, own: Sequence[Did]) -> None:
        self._made, self._compared, self._own = made, compared, own

    def diagnosis(self) -> Diagnosis | None:
        """The cause; None where the loop is right. Raises ``CannotDecide`` where nothing is known."""
        try:
            return self._known()
        except CannotDecide:
            drawn = self._made.outside_draw()
            if not drawn:
                raise
        raise CannotDecide(
            f"the loop draws random numbers from {drawn}, which for a share are others than for all rows: draw them "
            "with torch to have ranks compared"
        )

    def _known(self) -> Diagnosis | None:
        compared = self._compared
        if compared.equal:
            apart = compared.clips_apart()
            if apart is not None or not compared.equal_as_read:
                return _clipped(apart, cuts=not compared.equal_as_read)
            return self._exchanged_often()
        if compared.same_updates():
            return None
        if factors := compared.shards_scaled():
            return Diagnosis(
                "norm_of_one_shard",
                "each rank scales its shard of the gradient by another factor than the others",
                f"the shards are those of one process times {' and '.join(f'{f:.4g}' for f in factors)}",
            )
        strange = compared.dids[0].seen.strange
        weighing, outside = (None, 0.0) if strange else compared.weigh(compared.wrong)
        if weighing is not None:
            return self._of(weighing)
        if any(self._equal_when(layout) for layout in ("chunk", "stride", "whole")):
            return None
        if strange:
            raise CannotDecide(
                f"the ranks hold other weights than one process ({some(strange, most=2)}): they share out the model, "
                "and its gradients cannot be compared by name"
            )
        ratios = [a.ratio for a in compared.agreements]
        if all(a.cosine > 1 - CLOSE for a in compared.agreements) and max(ratios) - min(ratios) < CLOSE * max(ratios):
            found = in_one_direction(ratios[0], len(ratios))
            if abs(ratios[0] / len(ratios) - 1) < CLOSE and compared.same_losses(factor=len(ratios)):
                shown = f"{found.shown}; the ranks' losses are {len(ratios)} times that of one process as well"
                return replace(found, level="fault", shown=shown, repair="")
            return found
        if self._made.shares.window == 1 and self._gathers() and compared.same_losses():
            return Diagnosis(
                "gathered_without_gradient",
                "the ranks compute the loss of one process, and their gradient has another direction: "
                f"{outside:.1e} of it is no weighted sum of the gradients of their rows",
                "the mean of the ranks' first losses is that of one process to rounding",
            )
        raise CannotDecide(
            f"rows of different ranks interact: {outside:.1e} of what the ranks read is no weighted sum of the "
            "gradients of their shares, so that it need not equal that of one process"
        )

    def _of(self, weighing: Weighing) -> Diagnosis | None:
        wrapped = [did.seen.wrapped for did in self._own]
        compared = self._compared
        wrong = tuple(n for n in compared.expected if n in compared.wrong) or tuple(sorted(compared.wrong))
        seen = Circumstances(
            wrong=wrong,
            others=len(set(compared.expected) - compared.wrong),
            wrappers=max(w.built for w in wrapped),
            calls=max(w.calls for w in wrapped),
            valid=self._made.valid(weighing.one) if weighing.one else None,
        )
        found = of_weights(weighing, seen)
        if weighing.one is None and (found is None or found.cause not in OF_EACH_RANK):
            raise CannotDecide(
                "rows interact within a batch, and each rank takes its own rows alone: that need not equal one process"
            )
        apart = compared.clips_apart()
        if found is None and apart is not None:
            return _clipped(apart, cuts=True)
        if found is None:
            raise CannotDecide(
                "the ranks weigh their rows otherwise than one process, in no way that is known here: "
                f"{', '.join(listed(w) for w in weighing.ranks)}"
            )
        if weighing.pattern == "one_rank" and not compared.computed_apart():
            return None  # the rows of one rank are sent to all, which share out the model or the positions
        if weighing.pattern == "own" and self._come_together(wrong):
            raise CannotDecide(
                "each rank steps on its own gradient, and the weights are brought together after steps: what such a "
                "loop is to equal is not known here"
            )
        if found.cause == "never_synchronised" and not (self._calls() or any(w.asks for w in wrapped)):
            return replace(
                found,
                level="advice",
                summary=f"{found.summary}, and calls no collective: nothing takes notice of the knob",
                repair="pass the knob on: wrap the model in DistributedDataParallel where it is above 1",
            )
        if found.cause == "divided_twice" and self._equal_when("whole"):
            return Diagnosis(
                found.cause,
                f"{found.summary}: the loss is a sum over rows, and the mean of the ranks is taken",
                "with all rows on every rank the gradient is that of one process",
                level="advice",
                culprits=found.culprits,
                repair=f"multiply the loss by the number of ranks, or the learning rate by {weighing.world}",
            )
        return found

    def _calls(self) -> bool:
        """Whether the ranks call any collective of their own."""
        return any(c.kind != "init_process_group" for rank in self._made.launched for c in rank.collectives)

    def _come_together(self, names: Sequence[str]) -> bool:
        """Whether these weights are the same on all ranks after some step, though their gradients were not."""
        if come_together(self._compared.dids, names):
            return True
        return not same_everywhere(self._own) and come_together(self._own, names)

    def _equal_when(self, layout: Layout) -> bool:
        """Whether the ranks agree with one process when their rows are laid out so."""
        try:
            compared = self._made.compared(_ended(self._made.launch(layout), self._made.shares.world))
        except CannotDecide:
            return False
        # With all rows on every rank, rows that are gathered twice may change the loss and not its gradient.
        return compared.equal and (layout != "whole" or not self._gathers() or compared.same_losses(each=True))

    def _gathers(self) -> bool:
        """Whether ranks give each other values in the forward pass of the first step."""
        calls = self._made.launched[0].collectives
        return any(c.kind == "all_gather" and not c.in_backward and not c.steps for c in calls)

    def _exchanged_often(self) -> Diagnosis | None:
        """Whether the gradients are exchanged with every micro-batch."""
        window, compared = self._made.shares.window, self._compared
        size = sum(8 * math.prod(p.shape) for p in compared.one.parameters if p.name in compared.expected)
        sent = sum(
            c.bytes for c in self._made.launched[0].collectives if c.in_backward and not c.steps and "reduce" in c.kind
        )
        if window == 1 or not self._own[0].seen.wrapped.built or sent < window * size or not size:
            return None
        return Diagnosis(
            "synchronised_every_micro_batch",
            f"the ranks exchange their gradients in each of {window} micro-batches of a window",
            f"{sent // size} times the bytes of all gradients before the first step",
            level="advice",
        )


def _clipped(clips: Clips | None, *, cuts: bool) -> Diagnosis:
    if clips is None:
        return Diagnosis(
            "norm_of_one_shard",
            "before the clip the ranks have the gradient of one process, and after it they do not",
            "the gradients before the clip agree to rounding",
        )
    return Diagnosis(
        "norm_of_one_shard",
        f"the ranks clip by norms of {', '.join(f'{n:.4g}' for n in clips.ranks)}, and one process by {clips.one:.4g}",
        "the norms that clip_grad_norm_ gave" + ("" if cuts else "; on these rows the clip cuts nothing"),
        where=clips.line,
    )
