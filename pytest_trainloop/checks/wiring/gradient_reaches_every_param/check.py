"""A gradient reaches every parameter that an optimizer holds and the loss depends on.

What it does
    It records which gradients arrive at each held parameter over a watched run. Where none other than zero ever does,
    the loop is run again with that parameter moved. If what it backpropagates changes, the graph is cut, and a search
    names the operation that cuts it.

Why is this bad?
    A ``detach()`` left from debugging, a ``.item()`` on the loss path or a forward pass under ``no_grad`` lets part of
    the model keep its initial weights for ever, while the rest trains and the loss falls.

How it decides
    1. It takes each parameter that an optimizer holds and at which no gradient other than zero ever arrives. Gradients
       that user code takes by ``torch.autograd.grad`` and assigns count as arrived.
    2. It moves the parameter, at the initial weights and at weights moved a little. If what is backpropagated changes,
       code broke the chain rule (docs/how-it-decides.md#whether-the-loss-depends-on-a-parameter). The operation is
       named that lets a gradient arrive once it is passed through.
    3. A missing gradient without dependence is no cut: an expert without tokens, another task's head, LoRA's A in its
       first step, a teacher. An average of weights that the loop updates is not reported as uncalled.
    4. A zero gradient is a fault if one operation makes it: with that passed through, a gradient arrives. It is a fault
       too if the loss has a slope, and no hook of the project is on the gradient. Then two central differences in
       float64 agree. A flat loss is advice (a gate at zero).
    5. A result that the model gives out is a fault if the batch holds an unread target for it, of its shape and with a
       word of its name. If ``frozen=`` is given and does not name the parameter, it is a fault too.
    6. Of what no operation used, ``frozen=`` declares this only with ``batches=`` or as ``frozen=()``. An expert or
       another task's head may be used by other batches.
    7. One run shows optimizers whose steps find no gradient: a fault if no step uses the pass before.

    | seen | cause | advice if |
    |---|---|---|
    | the loss depends on it, and no gradient arrives | ``graph_cut``, ``no_grad_forward`` | it is a teacher |
    | the same, behind a checkpoint | ``checkpoint_cut`` |  |
    | an operation makes zeros, or the loss has a slope | ``gradient_vanished`` | softmax of one key; pretrained clamp |
    | it makes a constant of everything, or zero times zero | ``dead_activation`` | softmax of one key |
    | the loss is flat | ``gradient_vanished`` | always |
    | a module's parent drops the result | ``parameter_unused`` |  |
    | the model gives the result out | ``parameter_unused`` | item 5 does not hold |
    | no operation used it, or a call's result does not change | ``parameter_unused`` | item 6 does not hold |
    | a declared module is never called, and no loss depends on it | ``module_uncalled`` | always |
    | layers are frozen that ``frozen=`` does not name, or that were drawn | ``frozen_by_mistake`` | drawn, not loaded |
    | nothing requires grad | ``nothing_trainable`` |  |
    | adapters are frozen, or train together with their base weights | ``adapters_frozen``, ``base_left_trainable`` |  |

When it is skipped
    It skips a loop without a backward pass.

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
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.gradient_reaches_every_param.causes import CAUSES, found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check
from pytest_trainloop.core.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence


FEW = 2
"""Frozen matrices that were loaded, from which the others look forgotten."""


@check(needs={"run"}, causes=CAUSES, rank=20, steps=1)
def gradient_reaches_every_param(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param import unused, zeros

    record = evidence.run()
    yield from _adapters(record)
    mine = [p for p in record.parameters if p.role == "model" and p.declared]
    trains = any(p.requires_grad for p in mine) or any(record.reached(p.index) for p in record.parameters)
    if mine and not trains and not record.changed():  # weights that change in other ways need no gradients
        yield found("nothing_trainable", "", [p.name for p in mine], all=len(mine))
        return
    yield from _frozen_by_mistake(evidence)
    yield from unused.uncalled_modules(evidence)
    passes, message = record.autograd_passes(), record.raised.message if record.raised else ""
    refused = "does not require grad" in message or "has no attribute 'backward'" in message
    if not passes and not refused:
        raise CannotDecide(f"no backward pass was seen in {record.items} batches")
    if record.raised and not refused:
        last = passes[-1]
        if not last.arrivals or record.raised.place == last.place or record.raised.kind == "CheckpointError":
            return  # the exception inside the backward pass is the fault to show
    suspects = _suspects(record, refused=refused)
    never = [p for p in suspects if not record.last_arrivals(p.index)]
    if never:
        yield from _never_arrives(evidence, never, refused=refused)
    if zero := [p for p in suspects if p not in never]:
        yield from zeros.zero_gradients(evidence, zero)


def _adapters(record: Record) -> Iterator[Finding]:
    """Adapters (LoRA) that do not train, and the weights that they adapt where these train as well."""
    adapters = [p for p in record.parameters if p.role == "model" and "lora_" in p.name.lower()]
    trained = [p for p in adapters if p.requires_grad]
    others = sum(p.requires_grad for p in record.parameters)
    if adapters and not trained and others:
        yield found("adapters_frozen", "", [p.name for p in adapters], adapters=len(adapters), others=others)
    stems = {a.name[: a.name.lower().index("lora_")] for a in trained}
    base = [
        p.name
        for p in record.parameters
        if "lora_" not in p.name.lower()
        and p.requires_grad
        and len(p.shape) >= 2  # (odd: dora_detached_norm)
        and any((stem and p.name.startswith(stem)) or p.owner + "." == stem for stem in stems)
        and record.reached(p.index)
        and p.index in record.held
    ]
    if base:
        yield found("base_left_trainable", "", base, weights=len(base), adapters=len(trained))


def _frozen_by_mistake(evidence: Evidence) -> Iterator[Finding]:
    """Weights of torch's own layers that are frozen without being named in ``frozen=``; without that declaration, those
    that are frozen as they were drawn, in a model of which other frozen weights were loaded."""
    from pytest_trainloop.runs.weight_origins import drawn

    record = evidence.run()
    moved = record.moved_outside_steps()
    frozen = [
        p
        for p in record.parameters
        if p.declared
        and p.role == "model"
        and p.layer  # a module of the project's own may make a parameter with requires_grad=False (fixed positions)
        and p.calls_with_grad
        and not p.trainable
        and p.index not in moved
        and not record.declared_frozen(p.name)
    ]
    if record.frozen and frozen:
        declared = some(record.frozen, most=4)
        yield found("frozen_by_mistake", "", [p.name for p in frozen], weights=len(frozen), declared=declared)
    elif record.frozen is None and evidence.repeatable and any(p.trainable for p in record.parameters):
        matrices = [p.name for p in frozen if len(p.shape) > 1]
        random = [name for name in matrices if name in evidence.shared(drawn)] if len(matrices) >= FEW else []
        if random and len(matrices) - len(random) >= FEW:
            facts = {"weights": len(random), "loaded": len(matrices) - len(random)}
            yield found("frozen_by_mistake", "", random, "drawn", **facts, level="advice")


def _suspects(record: Record, *, refused: bool) -> list[Parameter]:
    """What is to train and has no gradient so far; of a backward pass that torch refused, all that it was for."""
    held, moved = record.held, record.moved_outside_steps()
    stepping = not refused and any(o.steps for o in record.optimizers)
    declared = any(o.declared for o in record.optimizers)
    copied = any(q.calls_with_grad and not q.declared and q.index in held for q in record.parameters)
    suspects = []
    for p in record.parameters:
        if not p.trainable or p.gone or p.role == "foreign" or (record.reached(p.index) and not refused):
            continue
        if 0 in p.shape or record.declared_frozen(p.name) or p.index in moved:
            # (odd: empty_parameter_that_tracks_the_device, detached_router_declared_frozen, moe_bias_moved_by_a_rule)
            continue
        if p.declared and copied and not (p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint):
            continue  # a copy of the model trains in its place: a fault for optimizer_holds_every_param
        holders = [record.optimizers[o] for o in held.get(p.index, ())]
        in_use = any(o.steps for o in holders) if stepping else bool(holders) or not declared
        suspects += [p] * in_use
    if not refused:
        return suspects
    # the pass is for what was not stepped yet; or for what the optimizer holds that follows upon the last step
    order = [step.optimizer for step in record.innermost_steps()]
    stepped = {i for o in set(order) for i in record.optimizers[o].parameters}
    waiting = [p for p in suspects if p.index not in stepped and not record.reached(p.index)]
    if waiting or not order:
        return waiting or suspects
    following = {after for before, after in itertools.pairwise(order) if before == order[-1]} or set(order)
    return [p for p in suspects if following & set(held.get(p.index, ()))]


def _never_arrives(evidence: Evidence, never: Sequence[Parameter], *, refused: bool) -> Iterator[Finding]:
    """Parameters that no gradient arrives at: cut off if the loss depends on them, and unused otherwise."""
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param import cuts, unused
    from pytest_trainloop.instruments.gradients.dependence import Dependences
    from pytest_trainloop.recording.record import within

    record = evidence.run()
    if not evidence.repeatable and (silent := list(cuts.steps_without_gradients(record, never))):
        yield from silent
        return
    depends = evidence.shared(Dependences).of([p.name for p in never])
    shift = max(d.change for d in depends.values())
    never = [p for p in never if not depends[p.name].alive]
    behind = [p for p in never if p.checkpoint is not None and not p.calls_with_grad]
    if behind and any(depends[p.name].depends for p in behind):
        owner = next((p.owner for p in behind if p.owner), "the segment")
        yield found("checkpoint_cut", behind[0].checkpoint, [p.name for p in behind], shift=shift, owner=owner)
        never = [p for p in never if p not in behind]
    no_history = not any(root.history for b in record.autograd_passes() for root in b.roots)
    cut_off = [p for p in never if no_history or depends[p.name].depends]
    teachers: list[str] = []
    yield from cuts.graph_cuts(evidence, [p.name for p in cut_off], shift, teachers, refused=refused)
    owners = {p.owner for p in cut_off}
    # idle parameters of a teacher are left out (odd: teacher_with_idle_parts)
    independent = [p for p in never if p not in cut_off and p.owner not in owners and not within(p.name, teachers)]
    yield from unused.unused_results(evidence, independent)
