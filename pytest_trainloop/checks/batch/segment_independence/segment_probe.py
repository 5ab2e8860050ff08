"""Whether an output of the model for one segment depends on the data of another, by exact gradients.

In evaluation mode the gradient of a segment's outputs with respect to what another one holds is exactly 0 where they
are kept separate: products with masked weights are products with 0, and sums over edges leave the others out. Where
they are not, the step on the whole batch runs in step with the one on that segment alone: by which calls do others come
in?"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.batch.segment_independence.causes import found
from pytest_trainloop.checks.batch.segment_independence.numbers import Lookups, sizes_of
from pytest_trainloop.checks.batch.segment_independence.own_rollouts import environments
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.whose import present, reraise_raised
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches import segments as reading
from pytest_trainloop.instruments.batches.episodes import LEAST_STEPS, read_episodes, segments_along
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.compositions.experiment import Experiment
from pytest_trainloop.instruments.gradients.reached import Reached
from pytest_trainloop.instruments.tracing.arguments import bound_arguments, named_arguments
from pytest_trainloop.instruments.tracing.forward_pass import ForwardPass, Op, grads, weighted_sum
from pytest_trainloop.instruments.tracing.lockstep import INDEXED, Entry, Lockstep, Tape
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import (
    ATTENTION,
    CLASS_LOSSES,
    CONVOLUTIONS,
    LOSSES,
    RECURRENT,
    REDUCTIONS,
    RESHAPES,
    SOFTMAXES,
)
from pytest_trainloop.runs.batch_stream import first_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.batches.segments import Segments
    from pytest_trainloop.instruments.compositions.experiment import Difference
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence

_KINDS = {
    "softmax": SOFTMAXES,
    "statistics": REDUCTIONS,
    "attention": ATTENTION,
    "convolution": CONVOLUTIONS,
    "recurrent": RECURRENT,
}
"""Calls by which segments meet, in the order in which each kind is tried alone."""

_CAUSE = {
    (True, "softmax"): "softmax_over_graphs",
    (True, "statistics"): "pooled_over_graphs",
    (True, "reshaped"): "cut_across_graphs",
    (False, "convolution"): "convolution_across_documents",
}
"""Of graphs, and of others, by what they meet in."""

_SPLITS = frozenset("split split_with_sizes tensor_split chunk".split())

_NEXT = 0.99
"""Of the targets that are the next token each, from which on they are taken for these."""


class SegmentPass(ForwardPass):
    """A pass that tells the names of what a model is called with."""

    calls: list[dict[str, Any]]
    lookups: Lookups
    segments: Callable[[], Segments | None]

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Operations outside of the model are kept as well: a pooling may be there."""
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
class Judged:
    """What one pass shows."""

    outputs: int = 0
    pair: tuple[int, int] | None = None
    """A segment whose outputs depend on the data of another, and that one."""
    cut: Op | None = None
    """What cuts the entries into parts, one for each segment, of which one holds entries of two."""
    has_nan: bool = False
    refused: str = ""
    in_loss: bool = False
    """Whether segments meet in what a loss is given, and not in what the model gives."""
    calls: Sequence[tuple[str, Place]] = ()
    """The functions that the model calls, with their lines."""


class InStep:
    """The step on one segment alone, and steps on the whole batch in step with it; of several rows of documents on the
    row that holds the segment. Raises ``CannotDecide`` where the segment alone cannot be taken or run."""

    def __init__(self, evidence: Evidence, batch: Any, segments: Segments, number: int, of_batch: bool) -> None:
        self._batch, self._tape = batch, Tape()
        try:
            if segments.ids.dim() == 2 and len(segments.ids) > 1:
                row = int((segments.ids == number).any(1).nonzero()[0])
                ids = segments.ids[row : row + 1]
                first = int(ids[ids >= 0].min())
                ids, number = torch.where(ids < 0, ids, ids - first), number - first
                segments = replace(segments, ids=ids, count=int(ids.max()) + 1)
                self._batch = nested.take(batch, [row])
            if of_batch:
                part = reading.take(self._batch, segments, (number,))
            else:  # what the model is called with tells the segments: one graph of a list
                part = nested.take(batch, (number,)) if nested.rows(batch) == segments.count else None
        except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:
            reraise_raised(error)
            part = None
        if part is None:
            raise CannotDecide("no segment can be taken from the batch alone")
        self._cut = reading.SegmentCut.of(segments, (number,))
        self._experiment = Experiment(evidence, "one segment of the batch alone")
        self._alone = self._experiment.arm(("alone",), lambda: part, self._tape)
        if not self._tape.calls:
            raise CannotDecide(self._alone.refused)

    def without(self, key: str, patched: Callable[[Entry], bool]) -> tuple[Difference | None, Lockstep]:
        """The step on the whole with the results of some calls replaced, and how its gradient differs from that of the
        segment alone."""
        mode = Lockstep(self._tape, self._cut, patched)
        made = self._experiment.arm(("without", key), lambda: nested.copy(self._batch), mode)
        return self._experiment.difference(self._alone, made), mode

    def agree(self, key: str, patched: Callable[[Entry], bool]) -> bool:
        """Whether both gradients are then equal."""
        left = self.without(key, patched)[0]
        return left is not None and left.equal


class SegmentPasses:
    """The passes of one loop. ``segments``: those of the example batch, or of what its model is called with first."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        loop = evidence.fresh_loop()
        self.batch = nested.copy(first_batch(loop))
        roles = evidence.declared("roles")
        self.keys: tuple[str, ...] = () if roles is None else roles.segments
        """The tensors that are declared as segments."""
        self.declared = evidence.declared("rows_interact") is not None or bool(self.keys)
        self.segments: Segments | None = reading.read(self.batch, self.keys, by_value=not self.keys)
        self._of_batch = self.segments is not None
        self.unclear = "" if self.segments else reading.unclear(self.batch)
        """Numbers that may be those of documents; empty where there are none, or they are embedded or targets."""
        by_value = self.segments.teller if self.segments and self.segments.by_value else self.unclear
        self._numbers = [t.flatten() for path, t in nested.paths(self.batch) if nested.shown(path) == by_value]
        """Those that are taken, or may be, for numbers of segments by their values."""
        self.disagreement = reading.disagreement(self.batch)
        self._episodes = None if self.segments else read_episodes(self.batch)
        self.labels: list[Finding] = []
        """Of documents whose last token has the first one of the next as its target."""
        self._next_tokens_seen = False
        self.reached = Reached()
        """Which segments the outputs of each one depend on, where some meet."""
        held = (b for m in loop.modules.values() for b in members.buffers(m))
        self._edges = [buffer.detach().clone() for buffer in held if reading.are_pairs(buffer)]
        self.lookups = Lookups(self.batch, self._edges)
        self.plays = any(environments(loop))
        """Whether the loop holds an environment."""
        self._own_data = self.segments is None and self._episodes is None and evidence.shared(makes_own_data)

    def meeting(self) -> Finding | None:
        """Two segments that meet in the model, and by what; None where none do. Raises ``CannotDecide``."""
        if self._episodes is None:
            return self._meeting()
        first: Finding | None = None
        for axis in (a for a, size in enumerate(self._episodes.ends.shape) if size > LEAST_STEPS):
            self.segments = segments_along(self._episodes, axis)
            here_ = self._meeting()
            if here_ is None:
                return None  # time runs along this axis, or nothing meets at all
            first = first or here_
        return first

    def _meeting(self) -> Finding | None:
        read = self.segments is not None or self._own_data or self._edges or self.unclear
        if not read and not reading.may_hold(self.batch):
            return None
        judged = self._pass()
        segments = self.segments
        if segments is None or not (judged.outputs or judged.refused or judged.has_nan):
            return None
        if judged.refused:
            raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {judged.refused}")
        if judged.has_nan:
            raise CannotDecide("gradients of the model's outputs are NaN (see finite)")
        if judged.pair is None:
            return None
        if judged.cut is not None:
            return self._named("reshaped", judged.pair, judged.cut.place, judged.cut.named)
        if (call := self._only_in_one_row(judged)) is not None:
            return self._named("rows", judged.pair, call[1], call[0])
        why, entry = self._by_what(judged.pair, in_loss=judged.in_loss)
        if judged.in_loss and not why:
            return None  # losses join the graphs of a batch on purpose
        if entry is None:
            return self._named("", judged.pair)
        return self._named(why, judged.pair, entry.place, entry.named, learned=entry.trained)

    def _only_in_one_row(self, judged: Judged) -> tuple[str, Place] | None:
        """The first call that the model makes of a row alone, and not of all of them, where two documents of that row
        meet in the batch and not in the row alone."""
        whole, segments, pair = self.batch, present(self.segments, "the segments"), present(judged.pair, "the pair")
        rows = [(segments.ids == number).any(1) for number in pair] if segments.ids.dim() == 2 else []
        if len(segments.ids) < 2 or not rows or not self._of_batch or not torch.equal(*rows):
            return None
        self.batch = nested.take(whole, rows[0].nonzero().flatten().tolist())
        self.segments, alone = reading.read(self.batch, self.keys, by_value=not self.keys), None
        if self.segments is not None:
            ids = segments.ids[rows[0]]
            alone = self._pass(pair[0] - int(ids[ids >= 0].min()))
        self.batch, self.segments = whole, segments
        if alone is None or alone.pair or alone.refused or alone.has_nan or not alone.outputs:
            return None
        return next((one for one, other in zip(alone.calls, judged.calls, strict=False) if one != other), None)

    def trains_otherwise(self) -> Iterator[Finding]:
        """Whether one of the documents that are kept separate in evaluation mode trains otherwise between others than
        alone, and by which calls: tables and constants, or where rows_interact=False is declared any."""
        segments = self.segments
        if segments is None or segments.kind != "document":
            return
        rows = segments.ids.reshape(-1, segments.ids.shape[-1])
        behind = [row[row >= 0].unique().tolist()[1:] for row in rows]
        most = max(behind, key=len)  # the last of a row may be padding
        if not most:
            return
        number = most[0]
        try:
            steps = InStep(self._evidence, self.batch, segments, number, self._of_batch)
        except CannotDecide:
            return
        difference, seen = steps.without("loss", lambda entry: not _before_the_loss(entry))
        entries = [entry for entry in seen.entries if _before_the_loss(entry)]
        if difference is None or difference.within_float32 or any(entry.op == "batch_norm" for entry in entries):
            return
        facts = {"difference": difference.agreement.difference, "number": number, "tokens": segments.sizes[number]}
        facts |= {"level": "fault" if self.declared else "advice", "kind": "document"}
        facts["by_value"] = segments.by_value and segments.teller
        smallest = f"documents {number - 1} and {number}"
        moved = [entry for entry in entries if not entry.joins or entry.moved]
        if moved and steps.agree("places", lambda e: not _before_the_loss(e) or not e.joins or e.moved):
            made = found("positions_run_on", moved[0].place, (moved[0].named,), **facts)
            yield replace(made, smallest=smallest)
        elif entries and self.declared and steps.agree("every", lambda entry: True):
            seen_first = next((entry for entry in entries if _kind(entry)), entries[0])
            made = found(
                "segments_interact", seen_first.place, (seen_first.named,), "training", named=seen_first.named, **facts
            )
            yield replace(made, smallest=smallest)

    def _by_what(self, pair: tuple[int, int], *, in_loss: bool) -> tuple[str, Entry | None]:
        """The kind of call without which nothing of the other segments comes into the first one before the loss, and
        its first call; without such a kind the call that says most."""
        try:
            steps = InStep(self._evidence, self.batch, present(self.segments, "the segments"), pair[0], self._of_batch)
        except CannotDecide:
            return "", None

        def entries(mode: Lockstep) -> list[Entry]:
            return [entry for entry in mode.entries if entry.joins and _before_the_loss(entry)]

        known = entries(steps.without("", lambda entry: False)[1])
        for kind in ("softmax", "statistics") if in_loss else ("softmax", "statistics", "attention", "convolution"):
            own = [entry for entry in known if _kind(entry) == kind]
            if not own:
                continue
            seen = steps.without(kind, lambda entry, kind=kind: _kind(entry) == kind)[1]  # type: ignore[misc]
            if any(_kind(entry) != kind for entry in entries(seen)) or (seen.unlike and seen.unlike.op not in LOSSES):
                continue
            # a loss may standardise what the model gives by the batch (odd: node_views_standardised_in_the_loss)
            if in_loss and kind == "statistics" and any(entry.spreads for entry in entries(seen)):
                continue
            # no attention separates the documents: they may be intended as one
            alone = kind == "convolution" and not seen.names & (ATTENTION | SOFTMAXES)
            return "" if alone else kind, own[0]
        return "", next((entry for entry in known if _kind(entry)), None) or next(iter(known), None)

    def _named(
        self, why: str, pair: tuple[int, int], at: Any = "", named: str = "", *, learned: bool = True
    ) -> Finding:
        """The finding of two segments that meet in a call. ``learned``: whether what meets has weights behind it, and
        is not the data itself."""
        segments = present(self.segments, "the segments")
        cause = _CAUSE.get((segments.kind == "graph", why), "segments_interact")
        intended = cause == "segments_interact" or (cause == "pooled_over_graphs" and not learned)
        facts = {"kind": segments.kind, "entry": segments.entry, "count": segments.count, "sizes": sizes_of(segments)}
        facts |= {
            "output": pair[0],
            "input": pair[1],
            "named": named,
            "by_value": segments.by_value and segments.teller,
        }
        intended = intended and why != "rows"
        facts["level"] = "advice" if not self.declared and (intended or segments.by_value) else "fault"
        variant = why if cause == "segments_interact" else ""
        made = found(cause, at, (named or segments.teller,), variant, **facts)
        return replace(made, smallest=self._smallest(pair))

    def _smallest(self, pair: tuple[int, int]) -> str:
        """The two segments, where a batch of these alone shows it."""
        whole, segments = self.batch, present(self.segments, "the segments")
        one, other = sorted(pair)
        two, small = reading.take(whole, segments, (one, other)), None
        if two is not None:
            self.batch, self.segments = two, reading.read(two, self.keys, by_value=not self.keys)
            small = None if self.segments is None else self._pass()
            self.batch, self.segments = whole, segments
        if small is None or small.pair is None:
            return f"all {segments.count} {segments.kind}s"
        sizes = segments.sizes
        return f"{segments.kind}s {one} and {other}, of {sizes[one]} and {sizes[other]} {segments.entry}s"

    def _pass(self, number: int = 0) -> Judged:
        """The pass, which judges the segment of this number and two others; once more with inputs that are no leaves
        where the model refuses these."""
        for open_inputs in (True, False):
            judged, returned = self._once(open_inputs, number)
            if returned:
                break
        return judged

    def _once(self, open_inputs: bool, number: int) -> tuple[Judged, bool]:
        judged, returned = Judged(), [False]

        def look(seen: ForwardPass, output: Any) -> None:
            returned[0] = True
            self._explain(e.ids for e in seen.data_inputs)
            if self.segments is not None and judged.pair is None:
                judged.calls = [(op.named, op.place) for op in seen.ops if op.module]
                self._look(seen, output, self.segments, judged, number)

        def call(arguments: Any) -> Any:
            if self.segments is None:
                self.segments = reading.read(seen.calls[-1])
                self.disagreement = self.disagreement or reading.disagreement(seen.calls[-1])
            return arguments

        def at_loss(pass_: ForwardPass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._explain((*args[1:], *kwargs.values()))
            self._look_at_labels(pass_, name, args, kwargs)
            if self.segments is not None and judged.pair is None and self.segments.kind == "graph":
                self._look(pass_, (args, kwargs), self.segments, judged)
                judged.in_loss = judged.pair is not None

        seen = SegmentPass(at_call=call, at_end=look, at_loss=at_loss, eval_mode=True, open_inputs=open_inputs)
        seen.calls, seen.lookups, seen.segments = [], self.lookups, lambda: self.segments
        given = {} if self._own_data else {"stream": lambda _loop: itertools.repeat(self.batch)}
        record = self._evidence.rerun(seen.plan(self._evidence.plan(), **given))
        return judged, returned[0] or record.raised is None

    def _look(self, seen: ForwardPass, output: Any, segments: Segments, judged: Judged, number: int = 0) -> None:
        given = [t for t in nested.tensors(output) if t.requires_grad and t.is_floating_point()]
        outputs = [(t, ids) for t in given if (ids := segments.of(t)) is not None]
        if not outputs and segments.kind == "document":  # the model returns its loss alone
            made = (t for op in reversed(seen.ops) if op.module for t in op.outputs if t.requires_grad)
            wide = (t for t in made if t.dim() > segments.ids.dim())
            outputs = [(t, ids) for t in wide if (ids := segments.of(t)) is not None][:1]
        entries = [(e.leaf, ids) for e in seen.data_inputs if (ids := segments.of(e.leaf)) is not None]
        if not outputs or not entries:
            return
        judged.outputs += len(outputs)
        try:
            for segment in sorted({0, number, segments.count // 2, segments.count - 1}):
                for ids, gradient in _gradients_of(outputs, entries, segment):
                    if bool(gradient.isnan().any()):
                        judged.has_nan = True
                        continue
                    reached = (gradient != 0).reshape(*ids.shape, -1).any(-1)
                    others = ids[reached & (ids != segment) & (ids >= 0)].tolist()
                    judged.pair = judged.pair or next(((segment, other) for other in others), None)
            if judged.pair is not None:
                judged.cut = next((op for op in seen.ops if _cuts_across(op, segments)), None)
                if not self.reached.parts:  # of the whole batch, not of two segments of it
                    self.reached.note(segments.count, lambda n: _along_segments(outputs, entries, n, segments.count))
        except RuntimeError as error:  # a re-entrant checkpoint refuses it, and some custom functions do
            reraise_raised(error)
            judged.refused = str(error).partition("\n")[0]

    def _explain(self, given: Iterable[Any]) -> None:
        """What is embedded, or is a target, numbers no segments."""
        whole = [t.flatten() for t in given if isinstance(t, torch.Tensor) and not t.is_floating_point()]
        for numbers in self._numbers:
            if any(len(t) == len(numbers) and torch.equal(t.to(numbers), numbers) for t in whole):
                self.unclear = ""
                self.segments = None if self.segments is None or self.segments.by_value else self.segments

    def _look_at_labels(self, seen: ForwardPass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Judge the first call of a loss over classes whose targets are the next tokens."""
        segments = self.segments
        if self._next_tokens_seen or segments is None or segments.kind != "document" or name not in CLASS_LOSSES:
            return
        given = bound_arguments(getattr(F, name), args, kwargs)
        target, documents = given.get("target"), segments.ids.cpu().reshape(-1, segments.ids.shape[-1])
        rows, length = documents.shape
        if not isinstance(target, torch.Tensor) or target.is_floating_point() or length < 2:
            return
        if target.numel() not in (rows * length, rows * (length - 1)):
            return
        labels = target.detach().reshape(rows, -1).cpu()[:, : length - 1]
        counted = labels != given.get("ignore_index", -100)
        for ids in (e.ids for e in seen.data_inputs if e.ids is not None and e.ids.numel() == documents.numel()):
            tokens = ids.detach().reshape(documents.shape).cpu()
            if not bool(counted.any()) or float((labels == tokens[:, 1:])[counted].double().mean()) < _NEXT:
                continue
            self._next_tokens_seen = True
            before, after = documents[:, :-1], documents[:, 1:]
            borders = (before != after) & (before >= 0) & (after >= 0)
            for first in before[borders & counted].tolist()[:1]:
                facts = {"across": int((borders & counted).sum()), "borders": int(borders.sum()), "first": first}
                facts |= {"level": "fault" if self.declared else "advice"}
                facts["by_value"] = segments.by_value and segments.teller
                made = found("labels_across_documents", here()[0], (name,), next=first + 1, kinds=("call",), **facts)
                self.labels.append(replace(made, smallest=f"documents {first} and {first + 1}"))
            return


def _gradients_of(
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    entries: Sequence[tuple[torch.Tensor, torch.Tensor]],
    segment: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The gradients of one segment's outputs with respect to what entered, each behind the segments of its entries."""
    parts = [weighted_sum(t[ids == segment]) for t, ids in outputs if bool((ids == segment).any())]
    if parts:
        made = grads(torch.stack(parts).sum(), [leaf for leaf, _ in entries])
        yield from ((ids, g) for (_, ids), g in zip(entries, made, strict=True) if g is not None)


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


def _kind(entry: Entry) -> str:
    """What kind of call lets segments meet; a softmax over pairs of entries is one of an attention."""
    if entry.pairs and entry.op in SOFTMAXES:
        return "attention"
    return next((kind for kind, names in _KINDS.items() if entry.op in names), "")


def _before_the_loss(entry: Entry) -> bool:
    """Whether a call is one of the model, or of what the loop makes of its outputs before they meet targets."""
    if entry.op in LOSSES or not {meeting.op for meeting in entry.met} <= INDEXED:
        return False
    reduced = entry.op in REDUCTIONS and entry.lost == entry.axes
    return bool(entry.module) or (entry.trained and not (entry.met or reduced))


def _cuts_across(op: Op, segments: Segments) -> bool:
    """Whether the operation cuts the entries into parts, one for each segment, of which one holds entries of two."""
    if not op.inputs or segments.ids.dim() != 1:
        return False
    given, ids = op.inputs[0], segments.of_entries(op.inputs[0])
    if ids is None or ids.dim() != 1 or len(given) != len(ids):
        return False
    if op.name in _SPLITS and len(op.outputs) == segments.count > 1:
        parts = [len(out) for out in op.outputs]
        return sum(parts) == len(ids) and any(len(set(part.tolist())) > 1 for part in torch.split(ids, parts))
    out = op.outputs[0] if op.name in RESHAPES and len(op.outputs) == 1 else None
    if out is None or len(out) != segments.count or out.dim() < 2 or len(set(segments.sizes)) == 1:
        return False
    numbers = ids.reshape(-1, *[1] * (given.dim() - 1)).expand(given.shape).reshape(out.shape).flatten(1)
    return segments.count != len(ids) and bool((numbers != numbers[:, :1]).any())
