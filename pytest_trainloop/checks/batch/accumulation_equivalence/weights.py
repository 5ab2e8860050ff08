"""How micro-batches weigh in a gradient, and what their weights prove.

Both gradients are written as sums of w_i g_i, g_i the gradient of micro-batch i alone, by least squares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.accumulation_equivalence.causes import CAUSES, found
from pytest_trainloop.checks.batch.accumulation_equivalence.windows import CLOSE, WINDOWS, Accumulation
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import code_of
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients
from pytest_trainloop.instruments.compositions.step_runs import bound, separable
from pytest_trainloop.instruments.gradients import compare
from pytest_trainloop.instruments.gradients.vectors import combination, consumed, vectors
from pytest_trainloop.instruments.tracing.root_terms import RootTerms
from pytest_trainloop.instruments.tracing.statements import window_size
from pytest_trainloop.recording.events import GradWrite, LossCall
from pytest_trainloop.recording.torch_names import ADDITIONS, DIVISIONS, MULTIPLICATIONS, SUBTRACTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.batch.accumulation_equivalence.windows import Split
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.compositions.step_gradients import StepGradient
    from pytest_trainloop.instruments.tracing.terms import Scalar
    from pytest_trainloop.runs.evidence import Evidence

OUTSIDE = 1e-9
"""Share of a gradient outside of a span from which it is none of its sums (separable losses stay below 1e-14)."""

NORMALISED = 1e-2
"""How near the lengths of two gradients of one direction are where the loop divides them by their norm plus some
epsilon. No cause changes a gradient by so little, and no learning rate is set more finely."""

MOST_MICRO_BATCHES = 8
"""Micro-batches at most, in a window of a loop without the knob."""

ARITHMETIC = ADDITIONS | SUBTRACTIONS | MULTIPLICATIONS | DIVISIONS | {"neg"}

SAME = 1e-9
"""Relative difference up to which a term's value counts as the same, or as doubled."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """The weights of micro-batches in the gradient of one batch, ``full``, and in the accumulated one, ``got``."""

    full: tuple[float, ...]
    got: tuple[float, ...]
    residual: float = 0.0
    """The share of the accumulated gradient that lies outside of their span."""
    by_counts: bool = False
    """Whether micro-batches weigh in one batch as their numbers of valid targets do."""

    @property
    def factor(self) -> float:
        return sum(self.got) / sum(self.full)

    @property
    def factor_to_next(self) -> float:
        """What the last micro-batch but one is multiplied by, where the last one counts as it should."""
        return self.got[-2] / self.full[-2] * self.full[-1] / self.got[-1]

    def decays_by(self, factor: float) -> bool:
        """Whether the last micro-batch weighs what it does in one batch, and each before it ``factor`` times the
        next."""
        due = [w * factor ** (len(self.full) - 1 - i) for i, w in enumerate(self.full)]
        return all(abs(g - d) < CLOSE * max(map(abs, self.got)) for g, d in zip(self.got, due, strict=True))

    @property
    def absent(self) -> list[int]:
        """Micro-batches that weigh nothing."""
        return [i for i, w in enumerate(self.got) if abs(w) < CLOSE * max(map(abs, self.got))]

    @property
    def pattern(self) -> str:
        k, factor = len(self.got), self.factor
        if self.absent:
            return "last absent" if self.absent[-1] == k - 1 else "absent"
        factors = [g / w for g, w in zip(self.got, self.full, strict=True)]
        if all_equal(factors):
            return "scaled"
        if all_equal([f * k ** (k - 1 - i) for i, f in enumerate(factors)]):
            return "divided by k again"
        if all_equal([f * (i + 1) for i, f in enumerate(factors)]):
            return "divided by place"
        if all_equal(self.got) and abs(factor - 1) < CLOSE:
            return "means"
        if all_equal(self.got) and (abs(factor - k) < CLOSE * k or abs(factor * k - 1) < CLOSE):
            return "scaled"
        return "scaled again" if self.decays_by(self.factor_to_next) else ""

    def facts(self) -> dict[str, Any]:
        return {"got": listed(self.got), "full": listed(self.full)}


def all_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= CLOSE * max(map(abs, values))


def listed(weights: Sequence[float]) -> str:
    largest = max(map(abs, weights))
    return "[" + ", ".join(f"{w:.3g}" if abs(w) > CLOSE * largest else "0" for w in weights) + "]"


def weigh(split: Split) -> Weighing:
    """The weights in the first window. Raises ``CannotDecide`` where examples interact."""
    by, optimizer, composition = split.by, split.optimizer, split.composition
    one_batch = by.weighted(split.one, optimizer, composition)
    if one_batch.residual > separable(split.bound):
        drawn = "" if by.cut.split_batch else some(by.gradients.drawn_otherwise(), most=2)
        raise CannotDecide(
            "examples interact: the gradient of the whole batch is no weighted sum of those of its parts "
            f"({one_batch.residual:.1e} of it lies outside), so that accumulation need not be equal"
            f"{f'; the loop draws {drawn}, where it is not known which row has what' if drawn else ''}"
        )
    got = by.weighted(split.many, optimizer, composition)
    by_counts = by.counts(one_batch, composition) is not None
    return Weighing(one_batch.weights, got.weights, got.residual, by_counts)


def proven(evidence: Evidence, wrong: Sequence[Split], splits: Sequence[Split]) -> Finding | None:
    """The first cause that an observation proves, or ``update_differs``; None where the loop brings gradients to a
    length. ``wrong`` are those of the splits whose gradients differ."""
    first = wrong[0]
    if first.windows[0].difference <= first.bound:
        return _later_window(first)
    if len(wrong) == len(splits) > 1 and _power(wrong):
        # k or 1/k times the gradient at every k: proof, whether examples interact or not
        return _scaled(evidence, wrong, splits, float(first.accumulate ** _power(wrong)), {})
    first.by.require_repeatable(first)
    weighing = weigh(first)
    backwards = first.by.run(Composition(first.composition.rows[::-1]))
    noise = compare.first_step_difference(first.one, backwards, first.optimizer)
    if noise * 1e3 > first.windows[0].difference:
        raise CannotDecide(
            f"reversing the rows of one batch changes the gradient by {noise:.1e} of its size: no equality is due"
        )
    parallel = all(w.windows[0].cosine > 1 - CLOSE for w in wrong)
    if parallel and all(abs(w.windows[0].ratio - 1) < NORMALISED for w in wrong):
        return None  # what is left of the factor is the epsilon that keeps the division from zero
    said = _of_weights(evidence, wrong if parallel else wrong[:1], splits, weighing)
    within, facts = weighing.residual <= OUTSIDE, weighing.facts()
    return said or first.found(
        "update_differs", "unknown", level="advice", within=within, outside=weighing.residual, **facts
    )


def _later_window(split: Split) -> Finding:
    """The first window is right, the second is not: what it holds too much, at the parameters where it does."""
    one, many = (consumed(record, split.optimizer, 1) or {} for record in (split.one, split.many))
    differing = {name for name, each in compare.by_tensor(one, many).items() if each.difference > split.bound}
    own = [consumed(part, split.optimizer, 0) or {} for part in split.by.parts(split.composition)]
    expected, got, *basis = vectors(
        [{n: v for n, v in g.items() if n in differing & many.keys()} for g in (one, many, *own)]
    )
    excess = combination(got - expected, basis)
    if excess and excess.residual < OUTSIDE and min(excess.weights) > CLOSE and all_equal(excess.weights):
        return split.found("carried_over", excess=listed(excess.weights))
    for finding in other_lrs(split):
        return finding
    raise CannotDecide(
        "the gradients of the first window agree and those of the second do not, for no reason that is known here: "
        "some state besides the weights survives from window to window"
    )


def other_lrs(split: Split) -> Iterator[Finding]:
    """Gradients that agree, and weights that do not, by the learning rate."""
    if split.lr_differs:
        yield split.found("update_differs", "learning rates", ("scheduler.step()",), split.step, level="advice")


def _power(wrong: Sequence[Split]) -> int:
    """1 where in every split the first window is the one batch's gradient times the number of micro-batches, -1 where
    it is that over this number, else 0."""
    for power in (1, -1):
        windows = [(w, s.accumulate**power) for s in wrong for w in s.windows[:1]]
        if all(abs(w.ratio / factor - 1) < CLOSE and w.cosine > 1 - CLOSE for w, factor in windows):
            return power
    return 0


def _scaled(
    evidence: Evidence,
    wrong: Sequence[Split],
    splits: Sequence[Split],
    factor: float,
    facts: dict[str, Any],
) -> Finding:
    """A gradient of the right direction and the wrong length."""
    first, k, rows = wrong[0], wrong[0].accumulate, wrong[0].composition.rows
    if factor < 1:
        copies = first.by.run(Composition(rows * k, (len(rows),) * k))
        if compare.first_step_difference(first.one, copies, first.optimizer) <= first.bound:
            # the batch size of the settings, an expected length: right for micro-batches of that size
            raise CannotDecide(
                f"the loss is divided by a constant: {k} whole batches a window give the gradient of one, and parts of "
                "it, with fewer rows, give less; give split_batch= where micro-batches of fixed size are due",
                needs="split_batch=",
            )
    count, ratio = len(first.by.cut.valid.order), first.windows[0].ratio
    facts = {**facts, "factor": factor, "rows": count, "sizes": _sizes(splits)}
    if all(abs(s.windows[0].ratio - count // s.accumulate * s.accumulate / count) < CLOSE for s in splits):
        return first.found("count_rounded_down", level="advice", **facts)
    power, right = _power(wrong), [s for s in splits if s.equal]
    if not power and right:
        return first.found("update_differs", "constant", level="advice", **{**facts, "sizes": _sizes(right)})
    exact = "" if not power else "the number of micro-batches" if factor > 1 else "one over the number of micro-batches"
    facts |= {"exact": exact, "sizes": _sizes(splits) if len(wrong) == len(splits) else ""}
    variant = "" if abs(ratio / factor - 1) < CLOSE else "unequal"
    finding = first.found("loss_not_divided" if factor > 1 else "divided_twice", variant, **facts)
    if finding.cause == "loss_not_divided" and not variant and not finding.repair:
        # the line of the backward pass with the loss divided by the loop's own number
        step = str(first.step.place) if first.step else ""
        if size := window_size(step, finding.where, evidence.knobs["accumulate"]):
            line, lines = re.subn(r"\b(\w+)\.backward\(\)", rf"(\1 / {size}).backward()", code_of(finding.where))
            finding = replace(finding, repair=f"{line}\n{CAUSES['loss_not_divided'].repair}" if lines == 1 else "")
    return finding


def _sizes(splits: Sequence[Split]) -> str:
    return " and ".join(", ".join(str(s.accumulate) for s in splits).rsplit(", ", 1))


def _grows_with_windows(split: Split) -> bool:
    """Whether a part of the loss is counted once for each micro-batch.

    Over the same rows, what windows of 4 give too much is then three times what windows of 2 give. It is about as much
    in the second window as in the first; what grows from one micro-batch to the next is something else.
    """
    rows = split.by.cut.valid.order[: len(split.by.cut.valid.order) // 4 * 4]
    if not rows:
        return False
    excess: dict[tuple[int, int], torch.Tensor] = {}
    for k in (2, 4):
        found_at = split.by.compared(Composition.evenly(rows, k))
        for nth in range(WINDOWS):
            both = [consumed(record, split.optimizer, nth) or {} for record in (found_at.one, found_at.many)]
            whole, got = vectors(both)
            excess[k, nth] = got - whole
    sizes = {key: float(torch.linalg.vector_norm(v)) for key, v in excess.items()}
    steady = all(0.5 < sizes[k, 1] / max(sizes[k, 0], 1e-300) < 2.0 for k in (2, 4))
    return steady and float(torch.linalg.vector_norm(excess[4, 0] - 3 * excess[2, 0])) <= 1e-6 * sizes[4, 0]


def _of_weights(
    evidence: Evidence, wrong: Sequence[Split], splits: Sequence[Split], weighing: Weighing
) -> Finding | None:
    """What the weights of the micro-batches say; None where they follow no known pattern."""
    first, k, pattern, facts = wrong[0], wrong[0].accumulate, weighing.pattern, weighing.facts()
    absent = len(weighing.absent)
    if weighing.residual > OUTSIDE:
        return first.found("loss_not_divided", "one term", **facts) if _grows_with_windows(first) else None
    if pattern == "last absent":
        return first.found("stepped_inside_window", "weighed", done=k - absent, **facts)
    if pattern == "absent":
        facts |= {"absent": absent, "several": absent > 1}
        one, many = (compare.passes(record, first.optimizer)[1] for record in (first.one, first.many))
        if many // max(1, one) <= k - absent:
            return first.found("only_last_counts", "no backward", **facts)
        start, end = (b.at for b in first.many.backwards()[:2])
        writes = [w for w in first.many.of(GradWrite) if start < w.at < end and w.how in ("none", "zero")]
        change = str(writes[0].place) if writes else ""
        return first.found("only_last_counts", change=change, **facts)
    if pattern == "scaled":
        return _scaled(evidence, wrong, splits, weighing.factor, facts)
    if pattern == "means" and weighing.by_counts:
        return first.found("mean_of_means", **facts)
    if pattern == "means":  # weights of classes or examples may be intended
        return first.found("mean_of_means", "own weights", level="advice", **facts)
    said = _by_place(weighing)
    if said is None:
        return None
    largest = weigh(splits[-1])
    again = pattern == "scaled again"
    same = largest.decays_by(weighing.factor_to_next) if again else largest.pattern == pattern
    cause, variant, more = said
    return first.found(cause, variant, **more, **facts) if same else None


def _by_place(weighing: Weighing) -> tuple[str, str, dict[str, Any]] | None:
    """The cause, its variant and its facts, of weights that differ by the micro-batches' places in their window."""
    pattern = weighing.pattern
    if pattern == "divided by place":
        return "loss_not_divided", "by place", {}
    if pattern == "divided by k again":
        return "divided_twice", "again", {"divided": "divided", "by_k": True, "factor": 0.0}
    if pattern == "scaled again":
        factor = weighing.factor_to_next
        divided = f"divided by {1 / factor:.6g}" if 0 < factor < 1 else f"multiplied by {factor:.6g}"
        return "divided_twice", "again", {"divided": divided, "by_k": False, "factor": factor}
    return None


def fixed_window(evidence: Evidence) -> Finding | None:
    """Micro-batches of a loop without the knob that accumulates all the same.

    The reference is a window in which every micro-batch is the whole batch of the rows: whatever the loop divides by,
    it divides both by. What is left to differ is how micro-batches weigh against each other: a factor common to all of
    them, which a learning rate may be tuned to, is not looked at.
    """
    seen = evidence.run()
    sizes = set(compare.window_sizes(seen)[:-1])  # what is left of the data may be fewer
    if len(sizes) != 1 or seen.rounds < 3 or not seen.rounds < seen.items:
        return None
    try:
        gradients = evidence.shared(StepGradients.of)
        k, rows = gradients.window, gradients.cut.valid.order
        if not 2 <= k <= min(MOST_MICRO_BATCHES, len(rows)) or not k * (seen.rounds - 1) < seen.items < k * (
            seen.rounds + 1
        ):
            return None
        # the rows with the fewest and the most valid targets are among them
        composition = Composition((*rows[: k - 1], rows[-1]), (1,) * k)
        whole, many = gradients.at(composition.whole()), gradients.at(composition)
        if not (whole.finite and many.finite) or gradients.differ(whole, many) <= gradients.bound(whole, many):
            return None
        split = Accumulation(gradients).between(whole.record, many.record, composition)
        weighing = weigh(split)
    except CannotDecide:
        return None
    repair = (
        f"{CAUSES['mean_of_means'].repair}; with a keyword accumulate=1 that is passed on to the loop it is a fault"
    )
    if weighing.residual > OUTSIDE:
        return None
    if weighing.pattern == "means" and weighing.by_counts:
        made = split.found("mean_of_means", level="advice", repair=repair, **weighing.facts())
    elif said := _by_place(weighing):
        made = split.found(said[0], said[1], **said[2], **weighing.facts())
    else:
        return None
    return replace(
        made,
        summary=f"in windows of {k} {made.summary}",
        shown_by=f"{made.shown_by}; the one batch is a window in which every micro-batch holds all of the rows",
        smallest=str(split.composition),
        composition=split.composition.as_data(),
    )


def of_declared_loss(evidence: Evidence) -> Iterator[Finding]:
    """Of a loop without the knob: whether dividing by k would be right for the declared loss."""
    if "loss" not in evidence.offers:
        raise CannotDecide(
            "add a keyword accumulate=1 to the test function, and give it to the loop (another name: knobs={...} in "
            "the marker)",
            needs="accumulate=1",
        )
    made = evidence.shared(Accumulation.of_loss)
    halves = Composition.evenly(made.cut.valid.order[: made.cut.rows(2)], 2)
    one = made.run(halves.whole())
    weighed = made.weighted(one, compare.optimizers(one)[0], halves)
    if weighed.residual > separable(bound(one)):
        raise CannotDecide(
            f"along axis {made.cut.axis} the declared loss is no weighted sum over rows: accumulation need not be "
            f"equal{'' if made.cut.declared else ', unless rows lie along another axis (batch_dim=)'}"
        )
    if not all_equal(weighed.weights):
        facts = {"k": 2, "full": listed(weighed.weights)}
        yield found("mean_of_means", "", ("loss",), "declared loss", level="note", **facts)


def mixed_terms(evidence: Evidence) -> Finding | None:
    """Terms of the loss of which one is a sum over rows and another a mean, or a mean over rows that is divided by
    their number once more: a fault where the loop accumulates.

    With every row twice a mean stays and a sum doubles: what g(S, S) has more than g(S) is the gradient of the sums, s,
    and what is left of g(S) that of the means, m. It is so where two rows confirm it: of rows a and b the sums give
    s_a + s_b, and the means a weighted mean of m_a and m_b. A penalty on weights is no mean over rows: its m is the
    same for each row. Rows that interact confirm nothing.
    """
    seen = evidence.run()
    means = {call.value for call in seen.of(LossCall) if call.reduction == "mean" and call.value is not None}
    roots = [root.value for b in seen.backwards() for root in b.roots]
    full = roots[: len(seen.of(LossCall))]  # later calls are not recorded
    if full and means.issuperset(full):
        return None  # every backward pass starts from one mean
    modes = RootTerms(), RootTerms()
    try:
        gradients = evidence.shared(StepGradients.of)
        rows = gradients.cut.valid.order[-2:]
        changes = next((c for c in (_grow_otherwise, _all_shrink) if len(rows) > 1 and c(gradients, rows)), None)
        if changes is None:
            return None
        other = gradients.along_other_axis(evidence)
        if other is not None and not changes(other, other.cut.valid.order[-2:]):
            return None  # a sum over time, if time comes first
        given = rows if changes is _all_shrink else rows[:1]
        once, twice = Composition(given), Composition(given * 2)
        for composition, mode in zip((once, twice), modes, strict=True):
            gradients.at(composition, contexts=(mode.contexts,))
    except CannotDecide:
        return None
    # each number that was computed, with its value for rows and for the rows twice
    before, after = (mode.scalars for mode in modes)
    pairs = list(zip(before, after, strict=True)) if len(before) == len(after) else []

    def changed(by: float) -> list[tuple[Scalar, Scalar]]:
        return [(a, b) for a, b in pairs if abs(b.value - by * a.value) <= SAME * abs(b.value) > 0]

    facts = {
        "once": once,
        "twice": twice,
        "difference": gradients.differ(gradients.at(once), gradients.at(twice)),
        "accumulates": "accumulate" in evidence.knobs,
        "level": "fault" if "accumulate" in evidence.knobs else "advice",
    }
    if changes is _all_shrink:
        cause, shown = "divided_by_rows_again", [(a, b) for a, b in changed(0.5) if a.op in DIVISIONS][:1]
    else:
        cause = "term_grows_with_rows"
        # calls that make one number of several
        grown, kept = ([p for p in changed(by) if p[0].op not in ARITHMETIC][-1:] for by in (2, 1))
        shown = grown
        facts["values"] = "; ".join(f"{a.op}() returns {a.value:.4g} and {b.value:.4g}" for a, b in grown + kept)
    name, place = (shown[0][0].op, shown[0][0].place) if shown else ("loss.backward()", "")
    made = found(cause, place, (name,), **facts)
    return replace(made, smallest=str(twice), composition=twice.as_data())


def _all_shrink(gradients: StepGradients, rows: Sequence[int]) -> bool:
    """Whether the gradient of rows is half as large where each is given twice: of two rows, and of each of them, which
    give different ones."""
    for part in (rows, rows[:1], rows[1:]):
        both = [gradients.at(Composition(made)) for made in (tuple(part), (*part, *part))]
        limit = separable(gradients.bound(*both))
        for optimizer in both[0].gradients:
            whole, more = _vectors(both, optimizer)
            if not bool(whole.any()) or compare.agreement(whole, 2 * more).difference > limit:
                return False
    alone = [gradients.at(Composition((row,))) for row in rows]
    return any(compare.agreement(*_vectors(alone, optimizer)).difference > CLOSE for optimizer in alone[0].gradients)


def _grow_otherwise(gradients: StepGradients, rows: Sequence[int]) -> bool:
    a, b = rows
    both = [gradients.at(Composition(made)) for made in ((a, b), (a, b, a, b))]
    for optimizer in both[0].gradients:
        whole, more = _vectors(both, optimizer)
        limit = separable(gradients.bound(*both)) * float(torch.linalg.vector_norm(whole))
        added = more - whole
        if any(float(torch.linalg.vector_norm(v)) <= limit for v in (added, added - whole)):
            continue  # a mean, or a sum
        alone = [gradients.at(Composition(made)) for made in ((a,), (a, a), (b,), (b, b))]
        whole, more, of_a, of_aa, of_b, of_bb = _vectors([*both, *alone], optimizer)
        sums, means = (of_aa - of_a, of_bb - of_b), (2 * of_a - of_aa, 2 * of_b - of_bb)
        weighed = combination(whole - sums[0] - sums[1], means)
        if (
            float(torch.linalg.vector_norm(more - whole - sums[0] - sums[1])) <= limit
            and compare.agreement(*sums).difference > CLOSE
            and weighed is not None
            and weighed.residual <= separable(gradients.bound(*both, *alone))
            and min(weighed.weights) > 0
            and abs(sum(weighed.weights) - 1) <= CLOSE
        ):
            return True
    return False


def _vectors(made: Sequence[StepGradient], optimizer: int) -> list[torch.Tensor]:
    """Raises ``CannotDecide`` where one of the gradients is not there, not finite or not in float64."""
    if not all(m.record.double and m.finite and optimizer in m.gradients for m in made):
        raise CannotDecide("the loop does not run on these rows")
    return vectors([m.gradients[optimizer] for m in made])
