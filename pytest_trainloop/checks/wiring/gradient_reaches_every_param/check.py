"""A gradient reaches every parameter that an optimizer holds and the loss depends on.

What it does
    It notes which gradients arrive at each held parameter over a watched run. Where none that is not zero ever does,
    the loop is run again with that
    parameter moved: if what it backpropagates changes, a wire is cut, and a search names the operation where.

Why is this bad?
    A ``detach()`` left from debugging, a ``.item()`` on the loss path or a forward pass under ``no_grad`` lets part
    of the model keep its initial
    weights for ever, while the rest trains and the loss falls.

How it decides
    The loss depends on w, yet dL/dw is nothing at every point of training: code broke the chain rule. Dependence is
    judged at the initial weights and at weights moved a
    little (behind a zero-initialised gate nothing depends at first). No gradient and no dependence is no cut wire: an
    expert without tokens, another task's head,
    LoRA's A in its first step, a teacher. Gradients taken by ``torch.autograd.grad`` and consumed by hand count as
    arrived.
    A zero gradient is a fault only where one operation is shown to make it: with that operation passed through, the
    gradient is there.

Faulty
    >>> def forward(self, x):
    ...     features = self.encoder(x).detach()      # left from debugging
    ...     return self.head(features)

Fixed
    >>> def forward(self, x):
    ...     return self.head(self.encoder(x))

Known limits
    Rounding noise in place of zeros (LayerNorm over one feature) is no zero, and weights that the loss does not depend
    on are left to the learning checks. A gate or router that is detached on purpose looks the same: name it in
    ``frozen=`` or ``skip=``. A parameter that
    only ever gets a zero gradient from an operation
    that is not known here is advice.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation
    https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import CLAMPS
from pytest_trainloop.registry import check
from pytest_trainloop.wording import be, some, them, they, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import Cut
    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio", "every_param_moves")

CAUSES = {
    "graph_cut": (
        "no gradient ever arrives, the loss depends on the parameter, and an operation gives its value on without "
        "its history"
    ),
    "no_grad_forward": "the operations on the path ran with gradients switched off",
    "checkpoint_cut": "the module ran only inside a checkpointed segment none of whose inputs requires grad",
    "gradient_vanished": (
        "a gradient arrives that is exactly zero, and an operation with a slope of zero lies on the path"
    ),
    "dead_activation": (
        "a gradient arrives that is exactly zero, and an activation or normalisation gives the same whatever comes in"
    ),
    "parameter_unused": "the parameter is computed with in the training forward pass, and the result goes nowhere",
    "frozen_by_mistake": "frozen= says what is meant to rest, and a layer's weight outside of it does not require grad",
    "nothing_trainable": "no parameter of the model requires grad",
    "adapters_frozen": "adapters are in the model and none of them requires grad",
    "base_left_trainable": "adapters and the weights they adapt are both trained",
}


@check(needs={"run"}, causes=CAUSES, rank=20)
def gradient_reaches_every_param(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.adapters import adapter_findings
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.requires_grad import (
        frozen_by_mistake,
        nothing_trainable,
    )

    record = evidence.run()
    yield from adapter_findings(record)
    if nothing := nothing_trainable(record):
        yield nothing
        return
    yield from frozen_by_mistake(record)
    if not record.autograd_passes() and not _stopped_at_backward(record):
        raise CannotDecide(f"no backward pass was seen in {record.items} batches")
    if not _stopped_at_backward(record) and _raised_inside_backward(record):
        return  # that is the fault to show
    suspects = [p for p in record.parameters if _in_scope(record, p)]
    never = [p for p in suspects if not record.last_arrivals(p.index)]
    zero = [p for p in suspects if p not in never]
    if never:
        yield from _never_arrives(evidence, record, never)
    if zero:
        yield from _arrives_as_zero(evidence, record, zero)


def _in_scope(record: Record, p: Parameter) -> bool:
    """Held by an optimizer that steps, meant to train, not moved by other hands, and without a gradient so far."""
    if (
        not p.trainable
        or p.gone
        or p.role == "foreign"
        or 0 in p.shape
        or (record.reached(p.index) and not _stopped_at_backward(record))
    ):
        return False
    if record.declared_frozen(p.name):
        return False
    if p.index in record.moved_outside_steps() or _stands_aside(record, p):
        return False
    holders = [record.optimizers[o] for o in record.held.get(p.index, ())]
    if _stopped_at_backward(record) or not any(o.steps for o in record.optimizers):
        return bool(holders) or not record.optimizers
    return any(o.steps for o in holders)


def _stands_aside(record: Record, p: Parameter) -> bool:
    """Whether another copy of the model trains in place of the declared one: that is for
    ``optimizer_holds_every_param`` to tell."""
    called = p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint
    return p.declared and not called and any(q.calls_with_grad and not q.declared for q in record.parameters)


def _stopped_at_backward(record: Record) -> bool:
    """Whether torch or Python refused the backward pass for want of a history."""
    if record.raised is None:
        return False
    message = record.raised.message
    return "does not require grad" in message or "has no attribute 'backward'" in message


def _raised_inside_backward(record: Record) -> bool:
    """Whether an exception ended the last backward pass before it was through."""
    if record.raised is None:
        return False
    last = record.autograd_passes()[-1]
    return not last.arrivals or record.raised.place == last.place or record.raised.kind == "CheckpointError"


def _never_arrives(evidence: Evidence, record: Record, never: Sequence[Parameter]) -> Iterator[Finding]:
    from pytest_trainloop.gradients.dependence import Dependences

    depends = evidence.shared(Dependences).of([p.name for p in never])
    never = [p for p in never if not depends[p.name].alive]
    change = max(d.change for d in depends.values())
    no_history = not any(root.history for b in record.autograd_passes() for root in b.roots)
    behind = [p for p in never if p.checkpoint is not None and not p.calls_with_grad]
    if behind and any(depends[p.name].depends for p in behind):
        yield _checkpoint(behind, change)
        never = [p for p in never if p not in behind]
    cut_off = [p for p in never if no_history or depends[p.name].depends]
    if cut_off:
        yield from _cut(evidence, record, cut_off, change)
    owners = {p.owner for p in cut_off}
    apart = [p for p in never if p not in cut_off and p.owner not in owners]
    if apart:
        yield from _unused(evidence, apart)


def _cut(evidence: Evidence, record: Record, cut_off: Sequence[Parameter], change: float) -> Iterator[Finding]:
    """One finding for each operation that cuts; what one operation explains is not looked at again."""
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import CutSearch

    left = list(cut_off)
    while left:
        names = [p.name for p in left]
        cut = evidence.shared(CutSearch).find(names, {"detach", "grad_off", "value", "custom"})[0]
        explained = [p for p in left if cut is not None and (not cut.reached or p.name in cut.reached | cut.fired)]
        yield _graph_cut(record, explained or left, change, cut)
        left = [p for p in left if explained and p not in explained]


def _checkpoint(behind: Sequence[Parameter], change: float) -> Finding:
    names = tuple(p.name for p in behind)
    owner = next((p.owner for p in behind if p.owner), "the segment")
    return Finding(
        cause="checkpoint_cut",
        summary=(
            f"{some(names)} {verb(names, 'get')} no gradient: {they(names)} {be(names)} behind a re-entrant "
            "checkpoint none of whose inputs requires grad"
        ),
        measured=f"0 gradients arrived; moving {them(names)} changes the loss by {change:.1e}",
        shown_by=(
            f"{owner} ran only inside the checkpoint's forward pass without gradients and was never run again in "
            "backward"
        ),
        culprits=names,
        where=str(behind[0].checkpoint),
        repair=(
            "checkpoint(..., use_reentrant=False); or make the segment's inputs require grad "
            "(enable_input_require_grads) before checkpointing is switched on"
        ),
        explains=("checkpointing_equivalence", *CONSEQUENCES),
    )


def _graph_cut(record: Record, cut_off: Sequence[Parameter], change: float, cut: Cut | None) -> Finding:
    names = tuple(p.name for p in cut_off)
    measured = (
        f"0 gradients arrived in {len(record.autograd_passes())} backward passes; moving {them(names)} changes the "
        f"loss by {change:.1e}"
    )
    whole = _stopped_at_backward(record)
    if cut is None:
        return Finding(
            cause="graph_cut",
            summary=f"{some(names)} {verb(names, 'get')} no gradient although the loss depends on {them(names)}",
            measured=measured,
            shown_by=(
                "no operation seen restores the gradient; tried without: detach, .data, no_grad, and values taken "
                "out of tensors in torch calls"
            ),
            culprits=names,
            where=str(record.raised.place) if record.raised else "",
            repair=(
                "look for a value that leaves torch or comes from another thread on the way from these parameters "
                "to the loss"
            ),
            explains=CONSEQUENCES,
        )
    off = cut.candidate.kind == "grad_off" and cut.gradient is not None
    op = "no_grad" if cut.candidate.kind == "grad_off" else _operation(cut.candidate.op)
    module = f" in {cut.candidate.module}" if cut.candidate.module else ""
    if cut.candidate.kind == "custom":
        shown = f"a gradient comes in at the output of {cut.candidate.op}, and its backward() gives an input none"
    elif cut.gradient is not None:
        shown = (
            f"with {'gradients switched on' if off else f'the {op} left out'} at that line, a gradient (largest "
            f"entry {cut.gradient:.2g}) reaches {names[0]}"
        )
    else:
        shown = (
            f"likely: moving what {op} gave at that line moves the loss by {cut.change:.1e}, and no gradient passes "
            "there"
        )
    return Finding(
        cause="no_grad_forward" if off else "graph_cut",
        summary=f"{some(names)} {verb(names, 'get')} no gradient although the loss depends on {them(names)}: "
        + (f"the forward pass{module} runs with gradients switched off" if off else f"the graph is cut by {op}{module}")
        + (", and torch refuses the backward pass" if whole else ""),
        measured=measured,
        shown_by=shown,
        culprits=names,
        where=str(cut.candidate.place),
        repair="run the training forward pass outside torch.no_grad() / inference_mode()"
        if off
        else f"keep the tensor and its history on the loss path; use {op} for logging only",
        explains=("loss_contract", *CONSEQUENCES),
    )


def _operation(op: str) -> str:
    return {"data": ".data", "__float__": "float()", "__int__": "int()", "__array__": "numpy", "numpy": ".numpy()"}.get(
        op, f"{op}()"
    )


def _unused(evidence: Evidence, apart: Sequence[Parameter]) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import CutSearch
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.exposed_results import ExposedResults

    used = [p for p in apart if p.calls_with_grad]
    touched = evidence.shared(CutSearch).find([p.name for p in used], set())[1] if used else set()
    thrown_away = [p for p in used if p.name in touched]
    if thrown_away:
        names = tuple(p.name for p in thrown_away)
        exposed = evidence.shared(ExposedResults).among(names)
        for level, chosen in (
            ("fault", [n for n in names if n not in exposed]),
            ("advice", [n for n in names if n in exposed]),
        ):
            if chosen:
                yield Finding(
                    cause="parameter_unused",
                    level="fault" if level == "fault" else "advice",
                    summary=(
                        f"{some(chosen)} {be(chosen)} computed with in every forward pass, and the result never "
                        "reaches the loss"
                    ),
                    measured="0 gradients arrived; moving " + them(chosen) + " does not change the loss",
                    shown_by=(
                        "the parameter enters an operation in the training forward pass, and nothing that is "
                        "backpropagated depends on the result"
                    ),
                    culprits=tuple(chosen),
                    repair="use the result (x = self.norm(x)), add its loss, or take the module out of the optimizer",
                    explains=("loss_contract", *CONSEQUENCES),
                )
    never = tuple(p.name for p in apart if p not in thrown_away)
    if never:
        yield Finding(
            cause="parameter_unused",
            level="advice",
            summary=f"{some(never)} {be(never)} held by an optimizer and took no part in these batches",
            measured="no gradient arrived and no operation used " + them(never),
            culprits=never,
            repair='give batches= that use it, or name it in frozen=("...",) if it is meant to rest',
        )


def _arrives_as_zero(evidence: Evidence, record: Record, zero: Sequence[Parameter]) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import CutSearch
    from pytest_trainloop.gradients.dependence import Dependences

    if all(root.value == 0.0 for b in record.autograd_passes() for root in b.roots):
        return  # the loss lies at its floor: a hinge that every example meets has nothing left to teach
    left = [p for p in zero if not (p.calls_empty and not p.calls_with_grad)]
    while left:
        names = [p.name for p in left]
        cut = evidence.shared(CutSearch).find(names, {"flat", "dead"})[0]
        if cut is None or not cut.reached:
            saddle = evidence.shared(CutSearch).saddles(names)
            if saddle:
                yield _saddle(tuple(saddle), max(saddle.values()))
                return
            depends = evidence.shared(Dependences).of(names)
            if any(depends[n].depends for n in names):
                yield _zero_advice(tuple(n for n in names if depends[n].depends))
            return
        chosen = [n for n in names if n in cut.reached]
        by_batch = "softmax" in cut.candidate.op and not cut.candidate.by_shape  # attention over the one key there is
        beside = by_batch and any(record.reached(p.index) for p in record.parameters)
        beside = beside or (_bounds(cut) and all(math.prod(p.shape) == 1 for p in left if p.name in chosen))
        yield _zeroed_by(tuple(chosen), cut, "advice" if beside else "fault")
        left = [p for p in left if p.name not in cut.reached]


def _bounds(cut: Cut) -> bool:
    """Whether the operation keeps a number within bounds: a single one that stands there (CLIP's scale) may be meant
    to."""
    return cut.candidate.op.rstrip("_") in CLAMPS | {"minimum", "maximum", "hardtanh"}


def _zero_advice(names: Sequence[str]) -> Finding:
    return Finding(
        cause="gradient_vanished",
        level="advice",
        summary=f"{some(names)} {verb(names, 'get')} only gradients that are exactly zero",
        measured="every gradient that arrived is zero in every entry, and moving " + them(names) + " changes the loss",
        shown_by=(
            "not determined; ruled out: rounding, clamping, units that are off for all data, normalisation over "
            "one entry"
        ),
        culprits=tuple(names),
        repair=(
            "look at what multiplies the result: a gate at zero, an expert without tokens, a group with rate 0 "
            "behind it"
        ),
    )


def _saddle(names: Sequence[str], gradient: float) -> Finding:
    return Finding(
        cause="dead_activation",
        summary=(
            f"{some(names)} {verb(names, 'start')} at exactly zero together with what multiplies {them(names)}: no "
            "gradient can ever leave that point"
        ),
        measured="every gradient that arrived is zero in every entry",
        shown_by=f"with all weights moved a little a gradient (largest entry {gradient:.2g}) reaches {names[0]}",
        culprits=tuple(names),
        repair="initialise only one of the factors to zero (LoRA: B at zero, A random)",
        explains=("input_dependence", *CONSEQUENCES),
    )


def _zeroed_by(names: Sequence[str], cut: Cut, level: Level) -> Finding:
    dead = cut.candidate.kind == "dead"
    op = cut.candidate.op.rstrip("_")
    module = f" in {cut.candidate.module}" if cut.candidate.module else ""
    return Finding(
        cause="dead_activation" if dead else "gradient_vanished",
        level=level,
        summary=f"{some(names)} {verb(names, 'get')} only zero gradients: "
        + (f"{op}{module} gives the same whatever comes in" if dead else f"{op}{module} has a slope of zero there"),
        measured="every gradient that arrived is zero in every entry",
        shown_by=(
            f"with {op} passed through at that line, a gradient (largest entry {cut.gradient or 0.0:.2g}) reaches "
            f"{names[0]}"
        ),
        culprits=tuple(names),
        where=str(cut.candidate.place),
        repair=_mend(op, dead),
        explains=("input_dependence", *CONSEQUENCES) if dead else CONSEQUENCES,
    )


def _mend(op: str, dead: bool) -> str:
    if not dead:
        return "keep it off the loss path, or pass the gradient straight through: x + (f(x) - x).detach()"
    if "softmax" in op:
        return "a softmax over one entry is always 1: check its dim, or use a sigmoid"
    if "norm" in op:
        return "a norm over one entry is always its bias: check the normalised shape"
    return (
        "check the bias and the scale in front of it: every unit is off for all of this data; lower the rate or "
        "use a leaky activation"
    )
