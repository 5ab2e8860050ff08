"""What the gradients of the ranks on equal shares of the same rows prove.

Where they differ from that of one process, both are written as weighted sums of the gradients of the shares alone: the
weights are the diagnosis.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.scale.distributed_equivalence.causes import PASS_THE_KNOB_ON, found
from pytest_trainloop.checks.scale.distributed_equivalence.comparison import Comparison, clip_norms
from pytest_trainloop.checks.scale.distributed_equivalence.own_batches import (
    bypassed_steps,
    come_together,
    ends_apart,
    same_everywhere,
)
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.wording import direction, some
from pytest_trainloop.instruments.batches.own_data import require_given_data
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.scale.distributed_equivalence.comparison import Layout, Weights
    from pytest_trainloop.checks.scale.distributed_equivalence.rank_runs import RankResult
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

CLOSE = 1e-6
"""How near a factor must come to another: weights are good to 1e-8, and one token in a million changes 1e-6."""

OF_EACH_RANK = ("own", "last_own", "one_rank", "clipped")
"""Patterns that the gradients of the ranks prove by themselves, whatever one process gives."""


def of_gradients(evidence: Evidence, world: int, own: Sequence[RankResult]) -> Finding | None:
    """The first comparison whose ranks differ from one process, and why; None where all agree. ``own`` is what the
    ranks did over the loop's own batches. Raises ``CannotDecide``."""
    require_given_data(evidence, "no rows can be shared out")
    window = evidence.shared(StepGradients.of).window
    for size in (1, 2) if "accumulate" in evidence.knobs else dict.fromkeys((window, 1)):
        made = Comparison.of(evidence, world, size)
        if made is None:
            continue  # too few rows
        finding = _Judge(made, own).finding()
        if finding is not None:
            return finding
        if size == window > 1:
            return None
    if Comparison.of(evidence, world, 1) is None:
        raise CannotDecide(f"the batch has too few rows for {world} ranks: give a larger one", needs="a larger batch")
    return None


class _Judge:
    """One comparison, and the further runs that separate its causes."""

    def __init__(self, made: Comparison, own: Sequence[RankResult]) -> None:
        self._made, self._own, self._world = made, own, made.world

    def finding(self) -> Finding | None:
        """None where the loop is right. Raises ``CannotDecide`` where nothing is known."""
        _ = self._made.results  # a launch that did not come to its end is its own reason
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

    def _found(self, cause: str, names: Sequence[str] = (), variant: str = "", at: str = "", **facts: Any) -> Finding:
        made = self._made
        worst = max(made.agreements, key=lambda a: a.difference)
        numbers = {"ratio": worst.ratio, "agrees": direction(worst.cosine), "precision": made.precision}
        numbers |= {"wrong": len(made.wrong), "parameters": len(made.expected)}
        return found(cause, at, names, variant, ranks=self._world, smallest=str(made), **numbers, **facts)

    def _known(self) -> Finding | None:
        made = self._made
        if made.equal:
            # a clip may find nothing to cut on these rows
            if made.clips_apart() is not None or not made.equal_as_read:
                return self._clipped(cuts=not made.equal_as_read)
            return self._exchanged_often()
        same = made.same_updates()
        if same or (same is None and not made.wrong.intersection(ends_apart(self._own))):
            return None
        if factors := made.shards_scaled():
            return self._found("norm_of_one_shard", variant="shards", factors=" and ".join(f"{f:.4g}" for f in factors))
        strange = made.results[0].strange
        if strange and (copies := self._copies_clipped()):
            return copies
        weights, outside = (None, 0.0) if strange else made.weights()
        if weights is not None:
            return self._of_weights(weights)
        # ranks that cut whole batches by themselves, or share out the model
        if any(self._equal_when(layout) for layout in ("chunk", "stride", "whole")):
            return None
        if strange:
            raise CannotDecide(
                f"the ranks hold other weights than one process ({some(strange)}): they share out the model, and its "
                "gradients cannot be compared by name"
            )
        ratios = [a.ratio for a in made.agreements]
        if all(a.cosine > 1 - CLOSE for a in made.agreements) and max(ratios) - min(ratios) < CLOSE * max(ratios):
            times = abs(ratios[0] / self._world - 1) < CLOSE and made.same_losses(factor=self._world)
            return self._in_one_direction(ratios[0], losses=times)
        if made.window == 1 and self._gathers() and made.same_losses():
            return self._found("gathered_without_gradient", outside=outside, change=self._line_of("gather"))
        raise CannotDecide(
            f"rows of different ranks interact: {outside:.1e} of what the ranks read is no weighted sum of the "
            "gradients of their shares, so that it need not equal that of one process"
        )

    def _of_weights(self, weights: Weights) -> Finding | None:
        made, (one, ranks, _) = self._made, weights
        pattern = pattern_of(weights)
        factor = sum(ranks[0]) / sum(one) if pattern == "scaled" and one else math.nan
        if one is None and pattern not in OF_EACH_RANK:
            raise CannotDecide(
                "rows interact within a batch, and each rank takes its own rows alone: that need not equal one process"
            )
        if pattern == "other":
            if made.clips_apart() is not None:
                return self._clipped(cuts=True)
            raise CannotDecide(
                "the ranks weigh their rows otherwise than one process, in no way that is known here: "
                f"{', '.join(map(listed, ranks))}"
            )
        if pattern == "one_rank" and not made.computed_by_rank():
            return None  # the rows of one rank are sent to all, which share out the model or the positions
        wrong = tuple(n for n in made.expected if n in made.wrong) or tuple(sorted(made.wrong))
        others = len(set(made.expected) - made.wrong)
        if pattern == "own" and self._come_together(wrong):
            raise CannotDecide(
                "each rank steps on its own gradient, and the weights are brought together after steps: what such a "
                "loop is to equal is not known here"
            )
        by_rank = ", ".join(f"rank {rank} {listed(each)}" for rank, each in enumerate(ranks))
        if pattern == "own" and others:
            return self._found("parameters_not_in_wrapper", wrong, others=others, several=others > 1, by_rank=by_rank)
        late = {name for r in self._own for name in r.late}
        if pattern == "own" and late and all(any(f".{n}".endswith(f".{name}") for name in late) for n in wrong):
            return self._found("parameters_not_in_wrapper", wrong, "replaced", by_rank=by_rank)
        if pattern == "own" and any(r.wrappers for r in self._own) and not any(r.wrapper_calls for r in self._own):
            return self._found("wrapper_bypassed", by_rank=by_rank)
        if pattern == "own" and (bare := bypassed_steps(self._own, wrong)):
            facts: dict[str, Any] = {"bare": len(bare), "steps": len(self._own[0].called), "step": bare[0] + 1}
            return self._found("wrapper_bypassed", (), "steps", **facts)
        if pattern in ("own", "one_rank") or abs(factor) < CLOSE:
            return self._never_synchronised(pattern, ranks, by_rank)
        if pattern == "last_own":
            return self._found("last_micro_batch_not_synchronised", window=made.window, by_rank=by_rank)
        if pattern == "means" and one is not None:
            # weights of classes or examples may be intended
            valid = made.valid(one)
            facts = {"got": listed(ranks[0]), "one": listed(one), "valid": ", ".join(map(str, valid or ()))}
            return self._found("mean_of_means", level="fault" if valid else "advice", **facts)
        if pattern == "clipped":
            return self._found("norm_of_one_shard", weights=listed(ranks[0]))
        return self._scaled(factor, wrong if others else ())

    def _never_synchronised(self, pattern: str, ranks: Sequence[Sequence[float]], by_rank: str) -> Finding:
        variant = pattern if pattern == "one_rank" else "" if pattern == "own" else "nothing"
        kept = _present(ranks[0]).index(True) // self._made.window if variant == "one_rank" else 0
        called = any(c.kind != "init_process_group" for rank in self._made.launched for c in rank.collectives)
        unread = not called and not any(r.asks_for_rank for r in self._own)
        made = self._found("never_synchronised", (), variant, kept=kept, by_rank=by_rank, unread=unread)
        return replace(made, level="advice", repair=PASS_THE_KNOB_ON) if unread else made

    def _scaled(self, factor: float, names: tuple[str, ...]) -> Finding:
        power = math.log(abs(factor)) / math.log(self._world)
        exact = factor > 0 and abs(factor / self._world ** round(power) - 1) < CLOSE
        if not (power > 0 if exact else factor > 1) and self._equal_when("whole"):
            return self._found("divided_twice", names if exact else (), "sum", factor=factor, level="advice")
        if not exact:
            return self._in_one_direction(factor)
        cause = "summed_over_ranks" if power > 0 else "divided_twice"
        change = "" if self._own[0].wrappers or power < 0 else self._line_of("reduce")
        return self._found(cause, names, factor=factor, times=self._world ** abs(round(power)), change=change)

    def _in_one_direction(self, factor: float, *, losses: bool = False) -> Finding:
        """The gradient of one process times a number that the learning rate may be set for: a fault where the loss is
        multiplied too."""
        cause, variant = "summed_over_ranks" if factor > 1 else "divided_twice", "losses" if losses else "direction"
        level = "fault" if losses else "advice"
        return self._found(cause, (), variant, factor=factor, inverse=1 / factor, level=level)

    def _clipped(self, *, cuts: bool) -> Finding:
        clips = self._made.clips_apart()
        if clips is None:
            return self._found("norm_of_one_shard", variant="after")
        norms, norm, line = clips
        shown = ", ".join(f"{n:.4g}" for n in norms)
        return self._found("norm_of_one_shard", (), "norms", line, norms=shown, norm=norm, cuts=cuts)

    def _copies_clipped(self) -> Finding | None:
        """Of ranks that share out the model: whether each clips its copy of the same gradient by another factor."""
        other = self._made.laid_out("whole")
        try:
            names = other.clipped_by_rank()
        except CannotDecide:
            return None
        # copies that are sent to all ranks after steps (odd: copies_sent_after_each_step)
        if not names or come_together(other.results, names) or come_together(self._own, names):
            return None
        clips = [clip_norms(result.require()) for result in other.results]
        norms = ", ".join(f"{norms[0]:.4g}" for norms, _ in clips if norms)
        return _Judge(other, self._own)._found("norm_of_one_shard", names, "copies", clips[0][1], norms=norms)

    def _come_together(self, names: Sequence[str]) -> bool:
        """Whether these weights are the same on all ranks after some step, though their gradients were not."""
        if come_together(self._made.results, names):
            return True
        return not same_everywhere(self._own) and come_together(self._own, names)

    def _equal_when(self, layout: Layout) -> bool:
        """Whether the ranks agree with one process when their rows are laid out so."""
        other = self._made.laid_out(layout)
        try:
            # with all rows on every rank, rows that are gathered twice may change the loss and not its gradient
            return other.equal and (layout != "whole" or not self._gathers() or other.same_losses(each=True))
        except CannotDecide:
            return False

    def _gathers(self) -> bool:
        """Whether ranks give each other values in the forward pass of the first step."""
        return any(self._called("gather"))

    def _line_of(self, kind: str) -> str:
        """The only line that calls such a collective by its name; DistributedDataParallel gathers where it is built."""
        lines = {line for line in self._called(kind) if kind in line}
        return lines.pop() if len(lines) == 1 else ""

    def _called(self, kind: str) -> Iterator[str]:
        """The lines of these collectives before the first step, but for those in a backward pass."""
        calls = self._made.launched[0].collectives
        return (str(c.place) for c in calls if c.kind == f"all_{kind}" and not c.in_backward and not c.steps)

    def _exchanged_often(self) -> Finding | None:
        """Whether the gradients are exchanged with every micro-batch."""
        made = self._made
        size = sum(8 * math.prod(p.shape) for p in made.one.parameters if p.name in made.expected)
        calls = made.launched[0].collectives
        sent = sum(c.bytes for c in calls if c.in_backward and not c.steps and "reduce" in c.kind)
        if made.window == 1 or not self._own[0].wrappers or sent < made.window * size or not size:
            return None
        times = sent // size
        return self._found("synchronised_every_micro_batch", window=made.window, times=times, level="advice")


def pattern_of(weights: Weights) -> str:
    """What the weights of the shares say.

    "own": each rank reads the gradient of its own rows alone; "last_own": of the last micro-batches it reads its own
    alone, and all of the others; "one_rank": all read the gradient of one rank's rows; "scaled": all ranks weigh what
    they do in one process times one factor; "means": they weigh the same, and in one process they do not; "clipped":
    each weighs one over the length of its own gradient; "other".
    """
    one, ranks, lengths = weights
    got, shares, window = ranks[0], range(len(lengths)), len(lengths) // len(ranks)
    own = [range(rank * window, (rank + 1) * window) for rank in range(len(ranks))]
    lasts = [places[-1] for places in own]
    if all(_present(w) == [i in own[rank] for i in shares] for rank, w in enumerate(ranks)):
        return "own"
    if window > 1:
        expected = [[i == last or i not in lasts for i in shares] for last in lasts]
        if all(_present(w) == places for w, places in zip(ranks, expected, strict=True)):
            return "last_own"
    largest = max(abs(w) for each in ranks for w in each)
    if any(abs(a - b) > CLOSE * largest for other in ranks[1:] for a, b in zip(got, other, strict=True)):
        return "other"
    if any(_present(got) == [i in places for i in shares] for places in own):
        return "one_rank"
    if one is not None:
        if _all_equal([g / w for g, w in zip(got, one, strict=True)]):
            return "scaled"
        if _all_equal(got) and abs(sum(got) / sum(one) - 1) < CLOSE:
            return "means"
    if _all_equal([w * n for w, n in zip(got, lengths, strict=True)]) and not _all_equal(lengths):
        return "clipped"
    return "other"


def listed(weights: Sequence[float]) -> str:
    present = _present(weights)
    return f"[{', '.join(f'{w:.3g}' if here else '0' for w, here in zip(weights, present, strict=True))}]"


def _present(weights: Sequence[float]) -> list[bool]:
    largest = max(map(abs, weights))
    return [abs(w) > CLOSE * largest for w in weights]


def _all_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= CLOSE * max(map(abs, values))
