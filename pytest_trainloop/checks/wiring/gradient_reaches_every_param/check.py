"""A gradient reaches every parameter that an optimizer holds and the loss depends on.

What it does
    It records which gradients arrive at each held parameter over a watched run. Where none that is not zero ever does,
    the loop is run again with that parameter moved: if what it backpropagates changes, the graph is cut, and a search
    names the operation that cuts it.

Why is this bad?
    A ``detach()`` left from debugging, a ``.item()`` on the loss path or a forward pass under ``no_grad`` lets part of
    the model keep its initial weights for ever, while the rest trains and the loss falls.

How it decides
    The loss depends on w, yet dL/dw is nothing at every point of training: code broke the chain rule. Dependence is
    judged at the initial weights and at weights moved a little (behind a zero-initialised gate nothing depends at
    first). No gradient and no dependence is no cut: an expert without tokens, another task's head, LoRA's A in its
    first step, a teacher. Gradients that user code takes by ``torch.autograd.grad`` and assigns count as arrived.
    A result that its module's parent drops is a fault. One that the model gives out beside others (a pooled state, the
    head of another task) is one where the batch holds a target for it, a tensor of its shape and with a word of its
    name that nothing reads. What takes no part is a fault where frozen= is given and does not name it, since all else
    is then declared to train: of what no operation used at all (an expert, the head of another task) with batches= or
    ``frozen=()``. Undeclared, both are advice. So is a module that ``model=`` names, that is never called and that no
    loss depends on: a target network that the loop updates, or one that it does not touch at all (an average of weights
    is updated and not called).
    A zero gradient is a fault where one operation is shown to make it (with that operation passed through, the gradient
    is there), or where the loss has a slope: central differences in float64 with two steps agree, and no hook of the
    project's own is on the gradient. A flat loss is advice: a gate at zero, an expert without tokens. So is a softmax
    over one key, where the batch has no more (a memory that begins with one entry), and one number that its clamp
    holds, in pretrained weights: it may have come there.

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
    ``frozen=`` or ``skip=``. The same holds for a head whose loss begins in a later epoch, with its target in the batch
    from the start.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation
    https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.consequences import TRAINING
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.torch_names import CLAMPS
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

_PARTS = (
    "loss_contract:part_detached",
    "loss_contract:part_left_out",
    "every_term_trains:term_detached",
    "every_term_trains:penalty_off_graph",
)
"""What the terms of a loss look like whose graph is cut."""

CAUSES = {
    "graph_cut": Cause(
        proof=(
            "no gradient ever arrives, the loss depends on the parameter, and an operation passes its value on without "
            "its history"
        ),
        repair="keep the tensor and its history on the loss path",
        explains=(*_PARTS, *TRAINING),
        change=("seen",),
    ),
    "no_grad_forward": Cause(
        proof="the operations on the path ran with gradients switched off",
        repair="run the training forward pass outside torch.no_grad() / inference_mode()",
        explains=(*_PARTS, *TRAINING),
        change=("seen",),
    ),
    "checkpoint_cut": Cause(
        proof="the module ran only inside a checkpointed segment none of whose inputs requires grad",
        repair=(
            "checkpoint(..., use_reentrant=False); or make the segment's inputs require grad "
            "(enable_input_require_grads) before checkpointing is switched on"
        ),
        explains=("checkpointing_equivalence:inputs_need_grad", *TRAINING),
        change=("seen",),
    ),
    "gradient_vanished": Cause(
        proof="a gradient arrives that is exactly zero, and an operation with a slope of zero lies on the path",
        repair="keep it off the loss path, or pass the gradient straight through: x + (f(x) - x).detach()",
        explains=TRAINING,
        change=("seen",),
    ),
    "dead_activation": Cause(
        proof=(
            "a gradient arrives that is exactly zero, and an activation or normalisation returns the same for every "
            "input"
        ),
        repair=(
            "check the bias and the scale in front of it: every unit is off for all of this data; lower the learning "
            "rate or use a leaky activation"
        ),
        explains=("input_dependence", "loss_at_init", *TRAINING),  # weights of 1 add up where they should average
        change=(
            "seen",
            "module",
        ),
    ),
    "parameter_unused": Cause(
        proof="the parameter is computed with in the training forward pass, and the result goes nowhere",
        repair="x = self.module(x): use what it returns, add its loss, or take the module out of the optimizer",
        change=("forward",),
        explains=(*_PARTS, "input_dependence", *TRAINING),
    ),
    "module_uncalled": Cause(
        proof="a module that model= names is never called in training, and no loss depends on it",
        repair="call it under no_grad() before this line and put its output in the loss, or leave it out of model=",
        change=("seen",),
    ),
    "frozen_by_mistake": Cause(
        proof="frozen= says what is meant to be frozen, and a layer's weight outside of it does not require grad",
        repair=(
            "switch requires_grad on for them (a prefix like 'layer1' also matches 'layer10'), or name them in frozen="
        ),
        explains=TRAINING,
        change=(
            "freeze",
            "module",
        ),
    ),
    "nothing_trainable": Cause(
        proof="no parameter of the model requires grad",
        repair="leave requires_grad on for what should train; with adapters: freeze the base first, then attach them",
        explains=TRAINING,
        change=("freeze",),
    ),
    "adapters_frozen": Cause(
        proof="adapters are in the model and none of them requires grad",
        repair="freeze the base before the adapters are attached, or switch requires_grad on again for the adapters",
        explains=TRAINING,
        change=(
            "freeze",
            "module",
        ),
    ),
    "base_left_trainable": Cause(
        proof="adapters and the weights they adapt are both trained",
        repair=(
            "base.requires_grad_(False) before this line, or pass only the adapters to the optimizer: "
            "(p for n, p in model.named_parameters() if 'lora' in n)"
        ),
        explains=("frozen_stays_frozen",),
        change=("group",),
    ),
}

_CLAMPS = CLAMPS | {"minimum", "maximum", "hardtanh"}


@check(needs={"run"}, causes=CAUSES, rank=20, steps=1)
def gradient_reaches_every_param(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param import findings
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.adapters import adapters, trained_base
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.requires_grad import (
        frozen_by_mistake,
        untrainable_model,
    )
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.uncalled_modules import uncalled_modules
    from pytest_trainloop.tracing.made_at import MadeAt

    record = evidence.run()
    attached = adapters(record)
    trained = sum(p.requires_grad for p in attached)
    if attached and not trained and any(p.requires_grad for p in record.parameters):
        yield findings.of_frozen_adapters(record, attached)
    if base := trained_base(record):
        yield findings.of_trained_base(base, trained)
    if nothing := untrainable_model(record):
        yield findings.of_untrainable_model(nothing)
        return
    if names := frozen_by_mistake(record):
        yield findings.of_frozen_by_mistake(names, record.frozen or ())
    for name, parameters, moved in uncalled_modules(evidence, record):
        yield findings.of_uncalled(record, name, parameters, moved=moved, made=evidence.shared(MadeAt.of).module(name))
    refused = _refused_backward(record)
    if not record.autograd_passes() and not refused:
        raise CannotDecide(f"no backward pass was seen in {record.items} batches")
    if not refused and _raised_inside_backward(record):
        return  # that is the fault to show
    suspects = [p for p in record.parameters if _in_scope(record, p, refused=refused)]
    if refused:
        suspects = _awaiting(record, suspects)
    never = [p for p in suspects if not record.last_arrivals(p.index)]
    zero = [p for p in suspects if p not in never]
    if never:
        yield from _never_arrives(evidence, record, never)
    if zero:
        yield from _arrives_as_zero(evidence, record, zero)


def _in_scope(record: Record, p: Parameter, *, refused: bool) -> bool:
    """Held by an optimizer that steps, meant to train, not moved by user code, and without a gradient so far."""
    if not p.trainable or p.gone or p.role == "foreign" or 0 in p.shape or (record.reached(p.index) and not refused):
        return False
    if record.declared_frozen(p.name) or p.index in record.moved_outside_steps() or _replaced_by_copy(record, p):
        return False
    holders = [record.optimizers[o] for o in record.held.get(p.index, ())]
    if refused or not any(o.steps for o in record.optimizers):
        return bool(holders) or not any(o.declared for o in record.optimizers)
    return any(o.steps for o in holders)


def _awaiting(record: Record, suspects: Sequence[Parameter]) -> list[Parameter]:
    """Those of the parameters that the refused backward pass was for: what has not been stepped yet; where everything
    has, what the optimizer holds that follows upon the last step in the order of the loop."""
    order = [step.optimizer for step in record.innermost_steps()]
    stepped = {i for o in set(order) for i in record.optimizers[o].parameters}
    waiting = [p for p in suspects if p.index not in stepped and not record.reached(p.index)]
    if waiting or not order:
        return waiting or list(suspects)
    following = {after for before, after in itertools.pairwise(order) if before == order[-1]} or set(order)
    return [p for p in suspects if following & set(record.held.get(p.index, ()))]


def _replaced_by_copy(record: Record, p: Parameter) -> bool:
    """Whether another copy of the model trains in place of the declared one, which ``optimizer_holds_every_param``
    reports."""
    called = p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint
    others = (q for q in record.parameters if q.calls_with_grad and not q.declared)
    return p.declared and not called and any(q.index in record.held for q in others)


def _refused_backward(record: Record) -> bool:
    """Whether torch or Python refused the backward pass for want of a history."""
    message = record.raised.message if record.raised else ""
    return "does not require grad" in message or "has no attribute 'backward'" in message


def _raised_inside_backward(record: Record) -> bool:
    """Whether an exception ended the last backward pass before it was through."""
    if record.raised is None:
        return False
    last = record.autograd_passes()[-1]
    return not last.arrivals or record.raised.place == last.place or record.raised.kind == "CheckpointError"


def _never_arrives(evidence: Evidence, record: Record, never: Sequence[Parameter]) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param import findings
    from pytest_trainloop.gradients.dependence import Dependences
    from pytest_trainloop.recording.record import within

    depends = evidence.shared(Dependences).of([p.name for p in never])
    never = [p for p in never if not depends[p.name].alive]
    change = max(d.change for d in depends.values())
    no_history = not any(root.history for b in record.autograd_passes() for root in b.roots)
    behind = [p for p in never if p.checkpoint is not None and not p.calls_with_grad]
    if behind and any(depends[p.name].depends for p in behind):
        yield findings.of_checkpoint(behind, change)
        never = [p for p in never if p not in behind]
    cut_off = [p for p in never if no_history or depends[p.name].depends]
    teachers: list[str] = []
    if cut_off:
        yield from _cut(evidence, record, cut_off, change, teachers)
    owners = {p.owner for p in cut_off}
    independent = [p for p in never if p not in cut_off and p.owner not in owners and not within(p.name, teachers)]
    if independent:
        yield from _unused(evidence, record, independent)


def _cut(
    evidence: Evidence, record: Record, cut_off: Sequence[Parameter], change: float, teachers: list[str]
) -> Iterator[Finding]:
    """One finding for each operation that cuts; what one operation explains is not looked at again. ``teachers`` gets
    the paths of modules that give targets only."""
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param import findings
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import CutSearch
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.teachers import Teachers

    refused = _refused_backward(record)
    left = [p.name for p in cut_off]
    while left:
        cut = evidence.shared(CutSearch).find(left, {"detach", "grad_off", "value", "custom"}).cut
        explained = [n for n in left if cut is not None and (not cut.reached or n in cut.reached | cut.fired)]
        names = tuple(explained or left)
        by_detach = cut is not None and cut.candidate.kind == "detach" and not cut.others
        wanted = evidence.shared(CutSearch).wanted_elsewhere(names, cut) if cut is not None and by_detach else None
        side = evidence.shared(CutSearch).other_side(names, cut) if cut is not None and wanted is None else None
        found = findings.of_cut(record, names, change, cut, wanted, side, refused=refused)
        whole = cut is not None and cut.candidate.kind == "grad_off" and not refused
        teacher = evidence.shared(Teachers).holding(names) if whole else ""
        teachers += [teacher] * bool(teacher)
        yield findings.of_teacher(found, teacher) if teacher else found
        # of a refused pass the parameters of other optimizers are not known to be cut off
        left = [n for n in left if explained and n not in explained and not refused]


def _unused(evidence: Evidence, record: Record, independent: Sequence[Parameter]) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param import findings
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import CutSearch
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.exposed_results import ExposedResults

    used = [p.name for p in independent if p.calls_with_grad]
    touched = evidence.shared(CutSearch).find(used, set()).touched if used else set()
    unused = tuple(name for name in used if name in touched)
    if unused:
        exposed = evidence.shared(ExposedResults).among(unused)
        dropped, optional = (tuple(n for n in unused if (n in exposed) is given) for given in (False, True))
        if dropped:
            yield findings.of_unused_result(dropped)
        if optional:
            yield from _given_out(evidence, record, optional)
    never = tuple(p.name for p in independent if p.name not in unused)
    if never:
        whatever_comes = record.frozen == () or (record.frozen is not None and "batches" in evidence.offers)
        yield findings.of_unused(never, record.frozen if whatever_comes else None)


def _given_out(evidence: Evidence, record: Record, names: tuple[str, ...]) -> Iterator[Finding]:
    """Results that the model gives out and the loop does not use: missing is the loss of one for which the batch has a
    target."""
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param import findings
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.exposed_results import ExposedResults
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.unread_targets import UnreadTargets

    shapes, targets = evidence.shared(ExposedResults).shapes, dict[frozenset[tuple[int, ...]], str]()
    for name in names:
        wanted = frozenset(shapes.get(name, ()))
        if wanted not in targets:
            targets[wanted] = evidence.shared(UnreadTargets).fitting(names, wanted)
    by_target: dict[str, list[str]] = {}
    for name in names:
        by_target.setdefault(targets[frozenset(shapes.get(name, ()))], []).append(name)
    for target, behind in by_target.items():
        yield findings.of_result_given_out(tuple(behind), target, record.frozen)


def _arrives_as_zero(evidence: Evidence, record: Record, zero: Sequence[Parameter]) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param import findings
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import CutSearch
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.left_out_values import leaves_out
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.local_slopes import LocalSlopes
    from pytest_trainloop.gradients.dependence import Dependences
    from pytest_trainloop.runs.weight_origins import pretrained

    if all(root.value == 0.0 for b in record.autograd_passes() for root in b.roots):
        return  # the loss is at its minimum: a hinge that every example meets has nothing left to teach
    left = {p.name: math.prod(p.shape) for p in zero if p.calls_with_grad or not p.calls_empty}
    while left:
        names = list(left)
        cut = evidence.shared(CutSearch).find(names, {"zero_slope", "constant"}).cut
        if cut is None or not cut.reached:
            if saddle := evidence.shared(CutSearch).saddles(names):
                yield findings.of_saddle(tuple(saddle), max(saddle.values()))
                return
            depends = evidence.shared(Dependences).of(names)
            if depending := tuple(n for n in names if depends[n].depends):
                sloping = evidence.shared(LocalSlopes).of(depending)
                yield findings.of_zero_gradient(
                    tuple(sloping) or depending, max(sloping.values(), default=0.0, key=abs)
                )
            elif evidence.repeatable and (call := leaves_out(evidence, names)) is not None:
                yield findings.of_left_out(record, tuple(names), call)
            return
        chosen = tuple(n for n in names if n in cut.reached)
        op = cut.candidate.op
        one_key = "softmax" in op and not cut.candidate.by_shape  # attention over the one key that the batch has
        one_key = one_key and any(record.reached(p.index) for p in record.parameters)
        scalar = op.rstrip("_") in _CLAMPS and all(left[n] == 1 for n in chosen)
        learned = scalar and evidence.shared(pretrained)  # the scale of a trained CLIP has reached its bound
        yield findings.of_zeroed(chosen, cut, one_key=one_key, bound=scalar, learned=learned)
        left = {n: size for n, size in left.items() if n not in cut.reached}
