"""Whether an output of the model for one segment depends on the data of another, by exact gradients.

In evaluation mode the gradient of a segment's outputs with respect to what another one holds is exactly 0 where they
are kept apart: products with masked weights are products with 0, and sums over edges leave the others out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop import members, nested
from pytest_trainloop.batches import segments as reading
from pytest_trainloop.batches.episodes import LEAST, read_episodes, segments_along
from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.checks.batch.segment_independence.example import example_batch
from pytest_trainloop.checks.batch.segment_independence.fixes import fixes, keeps_apart, mixes, reshaped
from pytest_trainloop.checks.batch.segment_independence.labels import BorderLabels
from pytest_trainloop.checks.batch.segment_independence.lookups import Lookups
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.reached import Reached
from pytest_trainloop.recording.torch_names import ATTENTION, CONVOLUTIONS, RECURRENT, SOFTMAXES
from pytest_trainloop.tracing.arguments import named_arguments
from pytest_trainloop.tracing.forward_pass import ForwardPass, Op, grads, weighted_sum
from pytest_trainloop.tracing.provenance import name_of
from pytest_trainloop.tracing.provenance_queries import ancestors
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from pytest_trainloop.batches.segments import Segments
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

Why = Literal["softmax", "statistics", "reshaped", "attention", "convolution", "unknown"]

_TELLING = ATTENTION | RECURRENT | CONVOLUTIONS | SOFTMAXES
"""Operations that say more than the products around them."""


@dataclass(frozen=True, slots=True)
class Interaction:
    """Outputs of segment ``output`` depend on what segment ``input`` holds."""

    output: int
    input: int
    segments: Segments
    why: Why
    op: Op | None
    learned: bool = True
    """Whether what meets has weights behind it, and is not the data itself."""
    alone: bool = False
    """Whether it shows on a batch of these two segments alone."""


class SegmentPass(ForwardPass):
    """A pass that tells the names of what a model is called with."""

    calls: list[dict[str, Any]]
    lookups: Lookups
    segments: Callable[[], Segments | None]

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Operations outside of the model are kept as well: a pooling may stand there."""
        outside = int(not self._depth)
        self._depth += outside
        try:
            out = super().call(name, func, args, kwargs)
        finally:
            self._depth -= outside
        with self.watch.suspended():
            self.lookups.look(self.segments(), name_of(func), args, out)
        return out

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._depth:
            self.calls.append(named_arguments(module, args, kwargs))
        return super()._enter(module, args, kwargs)


@dataclass(slots=True)
class _Judged:
    """What one pass shows."""

    outputs: int = 0
    interacting: tuple[int, int] | None = None
    mixing: list[Op] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    has_nan: bool = False
    refused: str = ""
    raw: frozenset[int] = frozenset()
    """Numbers of the operations whose inputs have no weights behind them."""
    reached: Reached = field(default_factory=Reached)
    """What the outputs of every segment depend on, with a closer look."""
    losses: int = 0
    """Tensors that a loss is given, among the outputs."""
    in_loss: bool = False
    """Whether segments meet in what a loss is given, and not in what the model gives."""

    @property
    def apart(self) -> bool:
        return self.outputs > 0 and self.interacting is None and not self.has_nan and not self.refused


class SegmentPasses:
    """The passes of one loop. ``segments``: those of the example batch, or of what its model is called with first."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._batch = evidence.shared(example_batch)
        roles = evidence.declared("roles")
        self._declared: tuple[str, ...] = roles.segments if roles is not None else ()
        self.segments: Segments | None = reading.read(self._batch, self._declared)
        self.disagreement = reading.disagreement(self._batch)
        self._episodes = None if self.segments else read_episodes(self._batch)
        self.labels = BorderLabels()
        self.reached = Reached()
        """Which segments the outputs of each one depend on, where some meet."""
        held = (b for m in evidence.fresh_loop().modules.values() for b in members.buffers(m))
        self._edges = [buffer.detach().clone() for buffer in held if reading.are_pairs(buffer)]
        self.lookups = Lookups(self._batch, self._edges)
        self._own_data = self.segments is None and self._episodes is None and evidence.shared(makes_own_data)

    def interaction(self) -> Interaction | None:
        """The same as ``_first``, and whether two segments alone show it."""
        found = self._first()
        if found is None:
            return None
        whole, segments = self._batch, self.segments
        two = reading.take(whole, found.segments, sorted((found.output, found.input)))
        if two is None:
            return found
        self._batch, self.segments = two, reading.read(two, self._declared)
        small = None if self.segments is None else self._pass()
        self._batch, self.segments = whole, segments
        return replace(found, alone=small is not None and small.interacting is not None)

    def _first(self) -> Interaction | None:
        """Two segments that meet in the model, and by what; None where none do. Raises ``CannotDecide``."""
        if self._episodes is None:
            return self._interaction()
        first: Interaction | None = None
        for axis in (a for a, size in enumerate(self._episodes.ends.shape) if size > LEAST):
            self.segments = segments_along(self._episodes, axis)
            found = self._interaction()
            if found is None:
                return None  # time runs along this axis, or nothing meets at all
            first = first or found
        return first

    def _interaction(self) -> Interaction | None:
        if self.segments is None and not self._own_data and not (self._edges or reading.may_hold(self._batch)):
            return None
        judged = self._pass()
        segments = self.segments
        if segments is None or not (judged.outputs or judged.refused or judged.has_nan):
            return None
        if judged.refused:
            raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {judged.refused}")
        if judged.has_nan:
            raise CannotDecide("gradients of the model's outputs are NaN (see finite)")
        if judged.interacting is None:
            return None
        judged = self._pass(look_closer=True)
        if judged.interacting is None:
            raise CannotDecide("two identical passes differ in whether segments meet in the model")
        self.reached = judged.reached
        cut = next((op for op in judged.ops if reshaped(op, segments)), None)
        if cut is not None:
            return Interaction(*judged.interacting, segments, "reshaped", cut)
        for why, ops, replacement in fixes(judged.ops, segments, pooled_only=judged.in_loss):
            without = self._pass(replacements={op.number: replacement for op in ops})
            if without.apart and (without.losses or not judged.in_loss):
                learned = any(op.number not in judged.raw for op in ops)
                alone = why == "convolution" and not any(keeps_apart(op, segments) for op in judged.ops)
                return Interaction(*judged.interacting, segments, "unknown" if alone else why, ops[0], learned)
        if judged.in_loss:
            return None  # losses join the graphs of a batch on purpose
        told = next((op for op in judged.mixing if op.name in _TELLING), None) or next(iter(judged.mixing), None)
        return Interaction(*judged.interacting, segments, "unknown", told)

    def _pass(self, *, look_closer: bool = False, **changed: Any) -> _Judged:
        """The pass; once more with inputs that are no leaves where the model refuses these."""
        for open_inputs in (True, False):
            judged, returned = self._once(look_closer, open_inputs, changed)
            if returned:
                break
        return judged

    def _once(self, look_closer: bool, open_inputs: bool, changed: Mapping[str, Any]) -> tuple[_Judged, bool]:
        judged, returned = _Judged(), [False]

        def look(seen: ForwardPass, output: Any) -> None:
            returned[0] = True
            if self.segments is not None and judged.interacting is None:
                _look(seen, output, self.segments, judged, look_closer)

        def call(arguments: Any) -> Any:
            if self.segments is None and not look_closer:
                self.segments = reading.read(seen.calls[-1])
                self.disagreement = self.disagreement or reading.disagreement(seen.calls[-1])
            return arguments

        def at_loss(pass_: ForwardPass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.labels.look(self.segments, pass_, name, args, kwargs)
            if self.segments is not None and judged.interacting is None and self.segments.kind == "graph":
                before = judged.outputs
                _look(pass_, (args, kwargs), self.segments, judged, look_closer)
                judged.losses += judged.outputs - before
                judged.in_loss = judged.interacting is not None

        def stream(_loop: TrainLoop) -> Iterator[Any]:
            return itertools.repeat(self._batch)

        seen = SegmentPass(
            at_call=call, at_end=look, at_loss=at_loss, eval_mode=True, open_inputs=open_inputs, **changed
        )
        seen.calls, seen.lookups, seen.segments = [], self.lookups, lambda: self.segments
        given = {} if self._own_data else {"stream": stream}
        record = self._evidence.rerun(seen.plan(self._evidence.plan(), **given))
        return judged, returned[0] or record.raised is None


def _look(seen: ForwardPass, output: Any, segments: Segments, judged: _Judged, look_closer: bool) -> None:
    given = [t for t in nested.tensors(output) if t.requires_grad and t.is_floating_point()]
    outputs = [(t, ids) for t in given if (ids := segments.of(t)) is not None]
    entries = [(e.leaf, ids) for e in seen.data_inputs if (ids := segments.of(e.leaf)) is not None]
    if not outputs or not entries:
        return
    judged.outputs += len(outputs)
    try:
        for segment in sorted({0, segments.count // 2, segments.count - 1}):
            _follow(outputs, entries, segment, judged)
        if look_closer and judged.interacting is not None:
            judged.ops = list(seen.ops)
            judged.mixing = [op for op in seen.ops if mixes(op, segments)]
            judged.reached.note(segments.count, lambda n: _along_segments(outputs, entries, n, segments.count))
            judged.raw = frozenset(
                op.number
                for op in seen.ops
                if op.inputs and not any(n.parameter for n in ancestors(seen.lineage.of(op.inputs[0])))
            )
    except RuntimeError as error:  # a re-entrant checkpoint refuses it, and some custom functions do
        reraise_raised(error)
        judged.refused = str(error).partition("\n")[0]


def _follow(
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    entries: Sequence[tuple[torch.Tensor, torch.Tensor]],
    segment: int,
    judged: _Judged,
) -> None:
    for ids, gradient in _gradients_of(outputs, entries, segment):
        if bool(gradient.isnan().any()):
            judged.has_nan = True
            continue
        reached = (gradient != 0).reshape(*ids.shape, -1).any(-1)
        others = ids[reached & (ids != segment) & (ids >= 0)]
        if len(others) and judged.interacting is None:
            judged.interacting = (segment, int(others[0]))


def _gradients_of(
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    entries: Sequence[tuple[torch.Tensor, torch.Tensor]],
    segment: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The gradients of one segment's outputs with respect to what entered, each behind the segments of its entries."""
    parts = [weighted_sum(t[ids == segment]) for t, ids in outputs if bool((ids == segment).any())]
    if parts:
        found = grads(torch.stack(parts).sum(), [leaf for leaf, _ in entries])
        yield from ((ids, g) for (_, ids), g in zip(entries, found, strict=True) if g is not None)


def _along_segments(
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    entries: Sequence[tuple[torch.Tensor, torch.Tensor]],
    segment: int,
    count: int,
) -> Iterator[torch.Tensor]:
    """The size of the gradients of one segment's outputs in each segment."""
    for ids, gradient in _gradients_of(outputs, entries, segment):
        sizes = gradient.abs().reshape(*ids.shape, -1).amax(-1)
        yield torch.stack([sizes[ids == n].sum() for n in range(count)])
