"""Targets that are noise the model was never given, that are among its inputs, or that a loss writes into: shown by
runs with other numbers.

A regression target must depend on the batch, or on random numbers that the prediction depends on too. Where it is the
result of one draw, and the prediction depends on another draw of its shape, the noise was drawn twice. A velocity
(noise minus data) is such a target as well; a sum of data and noise is none, since two noisy views of one row look so.
A table that keeps its target, or a window that is one step too long, gives the target away.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.learnable_targets.causes import found
from pytest_trainloop.checks.loss.learnable_targets.comparisons import FirstSteps
from pytest_trainloop.declare import nested
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.torch_names import CASTS, SUBTRACTIONS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.loss.learnable_targets.comparisons import Comparison
    from pytest_trainloop.checks.loss.learnable_targets.writes import Write
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.call_log import Call, Value
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

LEAST_TARGETS = 6
"""Different targets below which a column may equal them by chance: of 6 rows one order in 720 does."""


def other_draws(evidence: Evidence) -> Iterator[Finding]:
    """Each line that compares a prediction with noise that it does not depend on."""
    first = evidence.shared(FirstSteps.on)
    for compared in first.by_line:
        foreign, one = [_foreign(first, one) for one in compared], compared[0]
        drawn = foreign[0]
        if drawn is None or None in foreign:
            continue
        again, turned = (FirstSteps.seen(evidence, others)[0] for others in ({}, {drawn.number: _other_numbers}))
        if not _prediction(again, one) == one.prediction.digest == _prediction(turned, one):
            continue
        shape, target = drawn.outputs[0].shape, first.origin(one.target)
        wanted = sorted(n for n in first.origin(one.prediction) - target if isinstance(n, int))
        given = next((d for n in wanted if (d := first.calls[n]).outputs[0].shape == shape), None)
        facts = {
            "shape": " x ".join(map(str, shape)) or "one number",
            "target": drawn.place,
            "change": str(drawn.place),
        }
        if given is not None:
            facts |= {"velocity": "batch" in target, "given": given.place}
            yield found("target_is_other_draw", one.call, (drawn.name,), **facts)
        elif "batch" not in target:
            yield found("noise_not_given", one.call, (drawn.name,), level="advice", **facts)


def _foreign(first: FirstSteps, compared: Comparison) -> Call | None:
    """The draw that a target is made of and its prediction does not depend on."""
    wanted, had = first.origin(compared.target), first.origin(compared.prediction)
    draws = [n for n in wanted if isinstance(n, int)]
    if "opaque" in had or not had >= {"trained", "batch"} or len(draws) != 1 or not wanted <= {"batch", *draws}:
        return None
    drawn = first.calls[draws[0]]
    if drawn.number in had | first.left_torch or not drawn.outputs:
        return None
    if math.prod(drawn.outputs[0].shape) != math.prod(compared.target.shape):
        return None  # all pairs, or statistics of rows: no row has a partner
    if "batch" not in wanted:
        return drawn
    # a draw minus data, or data minus a draw, neither of them scaled
    call = compared.target.source(VIEWS | CASTS).made_by
    if call is None or call.name not in SUBTRACTIONS or len(call.inputs) != 2:
        return None
    sides = [value.source(VIEWS | CASTS) for value in call.inputs]
    noise, data = sum(side.made_by is drawn for side in sides), sum(bool(side.of_batch) for side in sides)
    return drawn if noise == data == 1 else None


def _other_numbers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A draw with its numbers in another order: as likely, and the generators are where they were."""
    out = func(*args, **kwargs)
    turned = out.detach().flatten().flip(0).reshape(out.shape).clone()
    if args and out is args[0]:
        with torch.no_grad():
            return out.copy_(turned)
    return turned


def _prediction(steps: FirstSteps, compared: Comparison) -> int | None:
    """The digest of the prediction in another run."""
    number = compared.call.number
    call = steps.calls[number] if number < len(steps.calls) else None
    if call is None or call.name != compared.call.name:
        return None
    side = [v is compared.prediction for v in compared.call.inputs].index(True)
    return call.inputs[side].digest if side < len(call.inputs) else None


def contained(evidence: Evidence) -> Iterator[Finding]:
    """Targets of the batch each column of which occurs in a tensor that their prediction is made of, in all rows."""
    first = evidence.shared(FirstSteps.on)
    given = {id(v): t for v, t in zip(first.batch, first.tensors, strict=True)}
    for one, *_ in first.by_line:
        target = one.target.source(VIEWS | CASTS)
        wanted = given.get(id(target))
        if wanted is None or one.call.step or not wanted.is_floating_point():
            continue
        sources = {id(v): v for v in one.prediction.origins(20_000) if v.of_batch and v.number == target.number}
        for source in sources.values():
            columns = _columns(given[id(source)], wanted) if source is not target else []
            if columns and _depends(evidence, one, source, columns):
                facts = {"input": source.of_batch, "target": target.of_batch, "rows": source.shape[0]}
                facts |= {"columns": ", ".join(map(str, columns[:4])), "more": len(columns) > 4, "level": "advice"}
                names = (source.of_batch, target.of_batch)
                yield found("input_contains_target", one.call, names, of=math.prod(source.shape[1:]), **facts)


def _columns(given: torch.Tensor, wanted: torch.Tensor) -> list[int]:
    """Where in the rows of an input each column of a target is; empty where one is not, or nothing is left."""
    if not given.dim() or not wanted.dim() or given.shape[0] != wanted.shape[0] or given.dtype != wanted.dtype:
        return []
    rows, targets = given.reshape(len(given), -1), wanted.reshape(len(wanted), -1)
    if targets.shape[1] >= rows.shape[1] or not targets.shape[1]:
        return []  # a net that gives back its input
    places = []
    for column in targets.T:
        equal = (rows == column.unsqueeze(1)).all(0).nonzero().flatten()
        if not len(equal) or len(column.unique()) < LEAST_TARGETS:
            return []
        places.append(int(equal[0]))
    return places


def _depends(evidence: Evidence, one: Comparison, source: Value, columns: list[int]) -> bool:
    """Whether the prediction is another one where these columns of the input change rows."""

    def prediction(turned: list[int]) -> int | None:
        steps = FirstSteps(steps=1)

        def prepared(number: int, item: Any) -> None:
            with steps.watch.suspended(), torch.no_grad():
                for path, tensor in nested.paths(item):
                    if turned and nested.shown(path) == source.of_batch and tensor.is_contiguous():
                        rows = tensor.view(len(tensor), -1)
                        rows[:, turned] = rows[:, turned].roll(1, 0)
            steps.take(number, item)

        evidence.rerun(
            contexts=steps.contexts,
            before_item=prepared,
            enough=lambda r: r.rounds >= 1,
            varied="with columns of an input in other rows",
            may_raise=True,
        )
        return _prediction(steps, one)

    same, other = prediction([]), prediction(columns)
    return same == one.prediction.digest and other is not None and other != same


def written_by_loss(evidence: Evidence) -> Iterator[Finding]:
    """Each line of a loss function that writes into a tensor which it is given, and which another term reads later."""
    first = evidence.shared(FirstSteps.on)
    states = {w.call.place for w in first.writes.writes if w.leaf < 0 and w.again}  # odd: mask_of_what_was_visited
    writes = [w for w in reversed(first.writes.writes) if w.call.place not in states and _suspected(first, w)]
    lines = {(w.call.place.file, w.call.place.line): w for w in writes}
    for write in lines.values():
        runs = [FirstSteps.seen(evidence, {}, restores)[1] for restores in (-1, write.call.number)]
        for loss, restored in zip(*map(_roots, runs), strict=False):
            if loss != restored and not (math.isnan(loss) and math.isnan(restored)):
                facts = {"function": write.function, "argument": write.argument, "loss": loss, "restored": restored}
                variant = "argument" if write.argument.isidentifier() else ""
                names = (first.batch[write.leaf].of_batch if write.leaf >= 0 else write.argument,)
                yield found("target_written_by_loss", write.call, names, variant, **facts)
                break


def _suspected(first: FirstSteps, write: Write) -> bool:
    """Whether the function computes a term of the loss, what it writes is not learned, and the tensor is read later."""
    if write.returned is None or not any(first.reaches_a_root(call) for call in write.reads):
        return False
    if any("trained" in first.origin(value) for value in write.call.inputs[1:]):
        return False  # it keeps results in the batch
    inside = [c for c in first.calls[write.call.number : write.returned] if c.grad]
    # terms of each row (TRL's get_batch_logps), but of the batch only numbers: a layer may write into its mask
    computed = [v for c in inside for v in c.outputs if v.history and (write.leaf < 0 or math.prod(v.shape) == 1)]
    return any(id(v) in first.leads for v in computed)


def _roots(record: Record) -> list[float]:
    """What is backpropagated before the first step."""
    until = min((s.at for s in record.innermost_steps()), default=math.inf)
    return [root.value for b in record.of(Backward) if b.at < until for root in b.roots]
