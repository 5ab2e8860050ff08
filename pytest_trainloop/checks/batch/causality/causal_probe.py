"""Whether outputs of a model that predicts the next input can see it, by exact gradients, and through what.

See docs/how-it-decides.md#rows-and-positions-by-exact-gradients.

The loss shows that the model predicts the next input: its targets are the inputs one position ahead (or a few), bit for
bit. Then output t may not depend on input t + 1: the gradient must be exactly 0. Which operation lets a position see
later ones is found by the gradient of each operation alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.batch.causality.causes import CAUSES, found
from pytest_trainloop.checks.batch.causality.operations_ahead import attentions, first_seeing, look_ahead
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.instruments.gradients.reached import Reached
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.instruments.tracing import definitions
from pytest_trainloop.instruments.tracing.arguments import bound_arguments
from pytest_trainloop.instruments.tracing.forward_pass import ForwardPass, grads, weighted_sum
from pytest_trainloop.instruments.tracing.operation_fixes import as_a_constant, moved_first
from pytest_trainloop.instruments.tracing.provenance_queries import layout
from pytest_trainloop.recording.function_mode import aside
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import CLASS_LOSSES, DISTANCE_LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_trainloop.checks.batch.causality.operations_ahead import Kind, OperationAhead
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.forward_pass import DataInput, Replacement
    from pytest_trainloop.instruments.tracing.provenance import Node
    from pytest_trainloop.runs.evidence import Evidence

Mode = Literal["training", "evaluation"]

FEWEST = 12
"""Positions at which targets and later inputs must be equal."""

FARTHEST = 4
"""Positions ahead that are tried, at most."""

_CAUSE: dict[Kind, str] = {
    "views": "view_mixes_positions",
    "softmax": "softmax_over_queries",
    "attention": "causal_mask_missing",
    "recurrent": "bidirectional_layer",
    "convolution": "convolution_sees_ahead",
    "statistics": "statistics_over_time",
    "other": "sees_the_future",
}
"""By kind of operation, in the order in which they are tried."""


class CausalPasses:
    """The passes behind ``causality``."""

    def __init__(self, evidence: Evidence) -> None:
        self._plan, self._evidence = evidence.plan(), evidence
        self._open_inputs = True
        self._counts: dict[int, torch.Tensor] = {}
        self.reached = Reached()
        """Which inputs each output depends on, where outputs see what they predict."""

    def leaks(self) -> Iterator[Finding]:
        """What lets outputs see the inputs that they predict, if something does. Raises ``CannotDecide`` where no loss
        compares outputs with later inputs."""
        training = self._once("training")
        refused = CannotDecide(f"no gradient can be taken of the model's outputs alone: {training.refused}")
        if not training.ahead:
            if training.refused:
                raise refused
            raise DoesNotApply("no loss function of torch is called with the next tokens as targets")
        by_mode: dict[Mode, OutputsAhead] = {"training": training, "evaluation": self._once("evaluation")}
        if any(seen.leaks for seen in by_mode.values()) and not all(bool(c.all()) for c in training.counted.values()):
            self._counts = training.counted  # a weight of 0 behind the loss (odd: prefix_seen_both_ways)
            by_mode = {mode: self._once(mode) for mode in by_mode}
        modes = [mode for mode, seen in by_mode.items() if seen.leaks]
        if not modes and training.refused:
            raise refused
        if modes and self._moves(modes[0], by_mode[modes[0]]):
            seen = self._once(modes[0], closer=True)
            self.reached = seen.reached
            yield self._finding(modes, seen)

    def _moves(self, mode: Mode, seen: OutputsAhead) -> bool:
        """Whether outputs change with the later inputs, as their gradients say. A function with a backward pass of its
        own may add gradients of another loss, as balances of experts do, that no output depends on."""
        entered, time, at = seen.entered

        def later_ones_differ(values: torch.Tensor) -> torch.Tensor:
            changed = values.movedim(time, 0).clone()
            changed[at + 1 :] = 0.5 - 1.5 * changed[at + 1 :]
            return changed.movedim(0, time)

        other = self._once(mode, edits={entered: later_ones_differ})
        if seen.outputs is None or other.outputs is None or other.outputs.shape != seen.outputs.shape:
            return True
        if not seen.outputs.numel():
            return True
        least = ROUNDING * torch.finfo(seen.outputs.dtype).eps * float(seen.outputs.abs().max())
        return bool(((other.outputs - seen.outputs).abs() > least).any())

    def _finding(self, modes: list[Mode], seen: OutputsAhead) -> Finding:
        kind, blamed, alone = self._why(modes[0], seen)
        first, see = (blamed[0].op if blamed else None), len({a.op.module for a in blamed})
        cause = _CAUSE[kind or "other"]
        if modes == ["evaluation"]:
            cause = "mask_missing_in_eval"
        elif kind == "attention":
            offsets = [offset for each in blamed for offset in each.offsets]
            if not offsets and {a.op.name for a in blamed} == {"softmax"}:
                cause = "masked_after_softmax"
            elif offsets and min(offsets) >= 0:
                cause = "mask_inverted"
            elif offsets and max(offsets) == 1:
                cause = "mask_off_by_one"
        evaluates = "evaluate" in self._evidence.offers or any(
            not f.training for f in self._evidence.run().root_forwards()
        )
        advice = seen.other_loss_is_clean or (cause == "mask_missing_in_eval" and not evaluates)
        facts: dict[str, Any] = {"loss": seen.loss, "ahead": seen.ahead if seen.ahead > 1 else 0, "alone": alone}
        facts |= {"first": f"{min(seen.offsets):+d}", "last": f"{max(seen.offsets):+d}", "modes": " and ".join(modes)}
        facts |= {"attentions": seen.attentions, "some": see if seen.attentions > see else 0}
        facts |= {"op": first.name if first else "", "level": "advice" if advice else "fault"}
        lines, masked = dict.fromkeys(str(a.op.place) for a in blamed if first and a.op.name == first.name), False
        if cause in ("causal_mask_missing", "mask_off_by_one", "mask_inverted"):
            of = definitions.CAUSAL_MASKS if cause == "causal_mask_missing" else ()
            masks = {line: definitions.mask(line, of=of) for line in lines}
            masked = cause == "causal_mask_missing" and all(masks.values())
            lines = dict.fromkeys(made or line for line, made in masks.items())
        facts["change"] = "" if len(lines) == 1 and CAUSES[cause].change[0] != "seen" else "\n".join(lines)
        if kind is None:
            facts["shown_by"] = CAUSES["sees_the_future"].shown_by
        culprits = tuple(dict.fromkeys(a.op.named for a in blamed))
        made = found(cause, first.place if first else seen.where, culprits, "masked" if masked else "", **facts)
        tried = "in a run without the later positions there no output depends on a later input"
        shown = alone and kind in ("attention", "softmax", "views")
        return replace(made, smallest=f"{seen.length} positions", tried=tried if shown else "")

    def _why(self, mode: Mode, seen: OutputsAhead) -> tuple[Kind | None, tuple[OperationAhead, ...], bool]:
        """The kind of operation without which nothing leaks, these operations, and true; else the first that sees later
        inputs, and false."""
        for kind in _CAUSE:
            kinds = ("attention", "softmax") if kind == "attention" else (kind,)
            blamed = tuple(a for a in seen.operations if a.kind in kinds)
            changed = {a.op.number: moved_first(seen.length) if a.kind == "views" else as_a_constant for a in blamed}
            without = self._once(mode, replacements=changed) if blamed else None
            if without is not None and without.ahead and not without.leaks and not without.refused:
                return kind, blamed, True
        first = seen.first
        return (first.kind if first else None), ((first,) if first else ()), False

    def _once(
        self,
        mode: Mode,
        *,
        closer: bool = False,
        replacements: Mapping[int, Replacement] | None = None,
        edits: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> OutputsAhead:
        judged = OutputsAhead(self._counts, closer)
        for open_inputs in (True, False) if self._open_inputs else (False,):
            seen = ForwardPass(
                at_loss=judged.look,
                eval_mode=mode == "evaluation",
                open_inputs=open_inputs,
                replacements=replacements or {},
                edits=edits or {},
            )
            plan = seen.plan(self._plan)
            record = self._evidence.rerun(plan)
            if judged.ahead or record.raised is None or replacements or edits:
                return judged
            self._open_inputs = False  # a model may refuse inputs that require a gradient
        self._evidence.require_returned(plan, record)
        return judged


@dataclass(frozen=True, slots=True)
class _Targets:
    """The targets of a loss call, with the position of each entry."""

    values: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    shape: tuple[int, int]
    """The numbers of rows and of positions."""
    kept: torch.Tensor
    """Which entries count in the loss."""
    time: int = 1
    """The axis of positions in the inputs."""

    @property
    def turned(self) -> _Targets:
        """The same where positions are the first axis and rows the second."""
        return replace(self, row=self.position, position=self.row, shape=self.shape[::-1], time=0)


@dataclass(slots=True)
class OutputsAhead:
    """What one pass shows of the first loss call whose targets are later inputs and whose outputs see them."""

    counts: Mapping[int, torch.Tensor]
    """By loss call, the entries that count; all of a call that is not in it."""
    closer: bool = False
    """Whether the operations that look ahead are looked for, too."""
    counted: dict[int, torch.Tensor] = field(default_factory=dict)
    """By loss call, the entries whose scores get a gradient from the loop's backward pass."""
    calls: int = 0
    judging: bool = False
    ahead: int = 0
    """By how many positions the targets are ahead of the inputs."""
    length: int = 0
    loss: str = ""
    where: str = ""
    offsets: set[int] = field(default_factory=set)
    """The inputs that outputs depend on, from their own position."""
    entered: tuple[int, int, int] = (0, 1, 0)
    """The number of the tensor of data, its axis of positions, and the last position whose outputs are kept."""
    outputs: torch.Tensor | None = None
    """Those up to that position."""
    other_loss_is_clean: bool = False
    """Whether outputs of another such call do not see the answer."""
    operations: list[OperationAhead] = field(default_factory=list)
    first: OperationAhead | None = None
    attentions: int = 0
    reached: Reached = field(default_factory=Reached)
    """What every output depends on, where outputs are looked at more closely."""
    refused: str = ""
    """Torch's message where no gradient could be taken."""

    @property
    def leaks(self) -> bool:
        """Whether outputs depend on the very inputs that they predict."""
        return self.ahead in self.offsets if self.ahead else False

    def look(self, seen: ForwardPass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Judge one call of a loss function, unless an earlier one leaks."""
        if name not in CLASS_LOSSES | DISTANCE_LOSSES:
            return
        given = bound_arguments(getattr(F, name), args, kwargs)
        scores, target = given.get("input"), given.get("target")
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor) or not scores.requires_grad:
            return
        place, number = here()[0], self.calls
        self.calls += 1
        self.judging = True
        try:
            targets = _targets(name, given, target.detach(), seen.lineage.of(scores))
            if targets is not None:
                on_gradient(scores, partial(self._count, number, name in CLASS_LOSSES))
                counts = self.counts.get(number, targets.kept)
                kept = targets.kept & counts if counts.shape == targets.kept.shape else targets.kept
                self._compare(seen, name, str(place), scores, replace(targets, kept=kept))
        except RuntimeError as error:
            reraise_raised(error)
            self.refused = str(error).partition("\n")[0]
        finally:
            self.judging = False

    def _count(self, number: int, by_class: bool, gradient: torch.Tensor) -> None:
        if not self.judging:
            with aside():
                counts = (gradient != 0).any(1) if by_class else gradient != 0
                self.counted[number] = counts | self.counted.get(number, counts)

    def _compare(self, seen: ForwardPass, name: str, place: str, scores: torch.Tensor, targets: _Targets) -> None:
        by_class = scores.movedim(1, -1) if name in CLASS_LOSSES else scores
        inexact = any(op.name.startswith("fft_") for op in seen.ops)
        known: list[tuple[DataInput, _Targets, int, set[int]]] = []
        # windows with a stride of one step fit both ways: the next row is the next token as well
        for read in (targets, targets.turned):
            for entered in seen.data_inputs if not known else ():
                if ahead := _ahead(entered, read):
                    offsets = _offsets(entered, by_class, read, ahead, inexact=inexact)
                    known.append((entered, read, ahead, offsets))
        clean = [one for one in known if one[2] not in one[3]]
        self.other_loss_is_clean = self.other_loss_is_clean or bool(clean)
        if not known or self.leaks:
            return
        # an encoder may be given the text that the decoder repeats (odd: transformer_with_time_first)
        entered, read, self.ahead, self.offsets = (clean or known)[0]
        self.loss, self.where, self.length = name, place, read.shape[1]
        at = self.length // 2
        self.entered = next(n for n, e in enumerate(seen.data_inputs) if e is entered), read.time, at
        self.outputs = by_class[(read.position <= at) & read.kept].detach()
        if self.leaks and self.closer:
            self.first = first_seeing(seen.ops, entered.leaf, self.length)
            self.attentions = attentions(seen.ops, self.length)
            self.operations = list(look_ahead(seen.ops, self.length))
            self.reached.note(self.length, partial(_along_positions, entered, by_class, read))


def _targets(name: str, given: Mapping[str, Any], target: torch.Tensor, source: Node | None) -> _Targets | None:
    """None where the scores come from no one layer over rows and positions, or targets have another shape."""
    at = layout(source)
    if at is None or len(at.leading) != 2:
        return None
    flat, kept = at.position, torch.ones_like(target, dtype=torch.bool)
    if name in CLASS_LOSSES:
        if target.is_floating_point() or given["input"].dim() != target.dim() + 1:
            return None
        flat, kept = flat.select(1, 0), target != given.get("ignore_index", -100)
    if flat.shape != target.shape:
        return None
    row, position = at.coordinates(flat.to(target.device))
    return _Targets(target, row, position, (at.leading[0], at.leading[1]), kept)


def _ahead(entered: DataInput, targets: _Targets) -> int:
    """By how many positions the targets are ahead of the inputs; 0 where they are no inputs, or match in several
    ways."""
    for values in _channels(entered, targets):
        if torch.unique(values).numel() < 4:
            continue
        fits = [by for by in range(-1, FARTHEST + 1) if _agree(values, targets, by)]
        if len(fits) == 1 and fits[0] > 0 and not _rotated(values, targets, fits[0]):
            return fits[0]
    return 0


def _channels(entered: DataInput, targets: _Targets) -> Iterator[torch.Tensor]:
    """The inputs at each row and position, one channel at a time."""
    floating, shape = targets.values.is_floating_point(), targets.shape[:: 2 * targets.time - 1]
    if entered.ids is not None:
        if tuple(entered.ids.shape) == shape and not floating:
            yield entered.ids.to(targets.values.device).movedim(targets.time, 1)
    elif tuple(entered.leaf.shape[:2]) == shape and floating:
        leaf = entered.leaf.detach().to(targets.values.device).movedim(targets.time, 1)
        yield from [leaf] if leaf.dim() == 2 else leaf.flatten(2).unbind(2)


def _agree(values: torch.Tensor, targets: _Targets, by: int) -> bool:
    later = targets.position + by
    there = targets.kept & (later >= 0) & (later < values.shape[1])
    if int(there.sum()) < FEWEST:
        return False
    return bool((values[targets.row[there], later[there]] == targets.values[there]).all())


def _rotated(values: torch.Tensor, targets: _Targets, by: int) -> bool:
    """Whether the last targets are the first inputs: the task is to rotate a sequence, not to predict what comes
    next."""
    later = targets.position + by
    past = targets.kept & (later >= values.shape[1])
    if not bool(past.any()) or torch.unique(targets.row[past]).numel() < 2:
        return False
    return bool((values[targets.row[past], later[past] % values.shape[1]] == targets.values[past]).all())


def _along_positions(entered: DataInput, scores: torch.Tensor, targets: _Targets, at: int) -> Iterator[torch.Tensor]:
    """The gradient of the outputs at one position, the positions of the inputs first; none where no target counts."""
    there = (targets.position == at) & targets.kept
    (gradient,) = grads(weighted_sum(scores[there]), [entered.leaf]) if bool(there.any()) else (None,)
    if gradient is not None:
        yield gradient.movedim(targets.time, 0)


def _offsets(entered: DataInput, scores: torch.Tensor, targets: _Targets, ahead: int, *, inexact: bool) -> set[int]:
    """The inputs that single outputs depend on, from the output's own position.

    A Fourier transform joins all positions and separates them again up to rounding: 1e3 machine epsilons of the largest
    gradient (as for sums in another order) count as nothing then.
    """
    length, position = targets.shape[1], targets.position
    asked = sorted({int(p) for p in torch.unique(position[targets.kept]).tolist() if p + ahead < length})
    offsets: set[int] = set()
    for at in sorted({asked[len(asked) * n // 4] for n in (1, 2, 3)} if asked else ()):
        for gradient in _along_positions(entered, scores, targets, at):
            least = ROUNDING * torch.finfo(gradient.dtype).eps * float(gradient.abs().max()) if inexact else 0.0
            nonzero = (gradient.abs() > least).reshape(len(gradient), -1).any(1)
            offsets |= {p - at for p in nonzero.nonzero().flatten().tolist()}
    return offsets
