"""Activation checkpointing changes what a step costs, and not its gradients.

What it does
    It runs the loop as it is, and with every checkpoint of torch's turned into a plain call of the same function, and
    compares what is backpropagated and the gradients that arrive: in float64, under one seed, from the same weights.
    With a knob ``checkpoint`` it compares both ways of the knob as well.

Why is this bad?
    What is run again in the backward pass must be what ran before. Where it draws other random numbers, or finds
    another state, gradients belong to a model that never made the loss; a re-entrant checkpoint whose inputs need no
    gradient gives none to all that lies behind it. Nothing is raised, and the loss still falls.

How it decides
    Both runs make the same operations, so that their gradients agree to rounding. Where they do not, one thing at a
    time is put right: checkpoints that no gradient can come through as plain calls; then the states of all generators
    (torch's, python's, numpy's, those that the loop made) put back where a function is run again. What makes the
    gradients agree is the cause. Where nothing does, every call of torch under a checkpoint is compared with the same
    call when it is run again; where all go alike, re-entrant checkpoints are replaced by others. Calls are compared as
    well where torch refuses the plain ones since a tensor was changed before its backward pass: a checkpoint hides
    that. The knob's other way is judged without dropout where only draws may come in another order.

Faulty
    >>> from torch.utils.checkpoint import checkpoint
    >>> for x, y in batches:
    ...     def encoded(x):
    ...         return F.dropout(model.encoder(x), 0.5)
    ...     features = checkpoint(encoded, x, use_reentrant=False, preserve_rng_state=False)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model.head(features), y).backward()
    ...     optimizer.step()

Fixed
    >>> from torch.utils.checkpoint import checkpoint
    >>> for x, y in batches:
    ...     def encoded(x):
    ...         return F.dropout(model.encoder(x), 0.5)
    ...     features = checkpoint(encoded, x, use_reentrant=False)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model.head(features), y).backward()
    ...     optimizer.step()

Known limits
    A recomputation of the project's own is seen only through the knob. Casts in a checkpointed path are for
    ``precision_parity``: in float64 there are none. Losses of later passes may differ, since what runs twice may move
    generators and counters twice: buffers that do are advice.

References
    https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import be, some, verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.checkpointing_equivalence.runs import Checkpointing, Verdict
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio")

CAUSES = {
    "inputs_need_grad": (
        "with the re-entrant checkpoints whose inputs require no grad as plain calls, the gradients are the same"
    ),
    "rng_not_preserved": (
        "with the states of generators put back where functions are run again, the gradients are the same"
    ),
    "side_result_cut": (
        "with checkpoints that are not re-entrant in place of re-entrant ones, the gradients are the same"
    ),
    "state_changed": (
        "the loss is the same, the gradients are not, and they stay so with every generator put back: what is run "
        "again finds another state"
    ),
    "other_computation": "the loss of the first forward pass already differs, or gradients do with nothing drawn",
    "statistics_updated_twice": "gradients agree, and buffers end otherwise than without checkpointing",
}


@check(needs={"run"}, causes=CAUSES, rank=60)
def checkpointing_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.checkpointing_equivalence.runs import Checkpointing, checkpoint_knob

    if checkpoint_knob(evidence) is None and not any(call.grad_enabled for call in evidence.run().checkpoints):
        raise CannotDecide(
            "no activation checkpointing was seen, and there is no knob checkpoint= that is True or False"
        )
    made = evidence.shared(Checkpointing)
    verdict = made.verdict()
    if verdict is not None:
        yield _FINDINGS[verdict.cause](verdict)
    elif twice := made.twice():
        yield _twice(made, twice)


def _measured(verdict: Verdict) -> str:
    apart = verdict.apart
    if verdict.plain_raised:
        return f"with checkpoints as plain calls fit raises {verdict.plain_raised[:160]}"
    if apart is None:
        return f"with checkpointing fit raises {verdict.raised}; without it does not"
    on, off = apart.loss
    loss = f"loss {on:.9g} with checkpointing and {off:.9g} without" if apart.forward else f"loss {off:.9g} both ways"
    agreement = apart.gradients
    return (
        f"{loss}; the gradients differ by {agreement.difference:.2g} of their size, cosine {agreement.cosine:.4f}, in "
        f"{len(apart.names)} parameters, {verdict.precision}"
    )


def _inputs_need_grad(verdict: Verdict) -> Finding:
    apart = verdict.apart
    names = verdict.bare or (apart.names if apart is not None else ()) or ("every parameter",)
    less = "no gradient" if apart is None or verdict.bare else "a part of its gradient only"
    return Finding(
        cause="inputs_need_grad",
        summary=f"{some(names)} {verb(names, 'get')} {less} under a re-entrant checkpoint whose inputs require no grad",
        measured=_measured(verdict),
        shown_by=(
            "some re-entrant checkpoints are handed no tensor that requires grad; with these alone as plain calls the "
            "gradients are those without checkpointing"
        ),
        culprits=names,
        where=verdict.place,
        repair=(
            "checkpoint(..., use_reentrant=False); or make the segment's inputs require grad "
            "(enable_input_require_grads)"
        ),
        explains=("gradient_reaches_every_param", "every_param_moves", *CONSEQUENCES),
    )


def _rng_not_preserved(verdict: Verdict) -> Finding:
    names = verdict.generators
    own = "a torch.Generator of its own" in names or any("of its own" in name for name in names)
    shown = f"with {some(names)} put back where functions are run again, the gradients are those without checkpointing"
    if verdict.by_hand:
        shown = "both ways make the same loss, and with nothing drawn the same gradients"
    if names == ("torch's generator",):
        repair = "leave preserve_rng_state=True (in a recomputation of your own, save and restore torch's state)"
    else:
        repair = (
            "draw before the checkpoint and pass what was drawn as an argument, or draw from torch's own generator, "
            "which checkpoint() preserves"
        )
    return Finding(
        cause="rng_not_preserved",
        summary=(
            f"under checkpointing {some(names)} {be(names)} not put back: the backward pass runs the functions again "
            "with other random numbers than made the loss"
        ),
        measured=_measured(verdict),
        shown_by=shown,
        culprits=names,
        where=verdict.place,
        repair=repair + (", or put its state back yourself" if own else ""),
        explains=CONSEQUENCES,
    )


def _side_result_cut(verdict: Verdict) -> Finding:
    names = verdict.apart.names if verdict.apart is not None else ("checkpoint",)
    return Finding(
        cause="side_result_cut",
        summary=(
            f"{some(names)} {verb(names, 'lose')} a part of the gradient under a re-entrant checkpoint: what its "
            "function leaves beside its result, or takes in a nest, has no history"
        ),
        measured=_measured(verdict),
        shown_by=(
            "with checkpoints that are not re-entrant in their place the gradients are those without checkpointing, "
            "and what is run again goes as it went before"
        ),
        culprits=names,
        where=verdict.place,
        repair=(
            "checkpoint(..., use_reentrant=False); or return from the function what the loss is to depend on (an "
            "auxiliary loss), in place of keeping it in a list or an attribute"
        ),
        explains=CONSEQUENCES,
    )


def _state_changed(verdict: Verdict) -> Finding:
    other = verdict.other
    call = "" if other is None else f"{other.op}()" + (f" in {other.module}" if other.module else "")
    ruled_out = "ruled out: generators of random numbers, inputs that require no grad"
    if other is None:
        shown = f"which call goes otherwise is not determined; {ruled_out}"
    elif other.instead:
        shown = f"when it is run again, {other.instead} comes in place of {call}; {ruled_out}"
    else:
        shown = f"when it is run again, {call} gives something else (by up to {other.by:.2g}); {ruled_out}"
    names = () if verdict.apart is None else verdict.apart.names
    culprits = tuple(n for n in (other.module, other.op) if n) if other is not None else names or ("checkpoint",)
    return Finding(
        cause="state_changed",
        summary=(
            "what runs under a checkpoint finds another state when the backward pass runs it again"
            + (f": {call}" if call else "")
        ),
        measured=_measured(verdict),
        shown_by=shown,
        culprits=culprits,
        where=other.place if other is not None else verdict.place,
        repair=(
            "call backward() before anything changes what the checkpointed function reads (an optimizer's step, a "
            "write in place)"
            if verdict.plain_raised
            else "change no state inside a checkpointed function (counters, caches, buffers, its inputs): read it "
            "before, pass it as an argument, write it after"
        ),
        explains=CONSEQUENCES,
    )


def _other_computation(verdict: Verdict) -> Finding:
    apart = verdict.apart
    forward = apart is not None and apart.forward
    names = () if apart is None else apart.names
    if forward:
        summary = "the loop computes another loss with checkpointing than without"
        shown = "the loss of the first forward pass differs, before anything is run again"
    else:
        summary = "the loop's own recomputation gives other gradients for the same loss"
        shown = "the loss is the same and the gradients are not, also with nothing drawn"
    return Finding(
        cause="other_computation",
        summary=summary,
        measured=_measured(verdict),
        shown_by=shown,
        culprits=names or ("loss",),
        where=verdict.place,
        repair=(
            "run the same modules in the same order with the same arguments in both ways (masks, flags, the last "
            "layer), and decide nothing by torch.is_grad_enabled()"
        ),
        explains=CONSEQUENCES,
    )


def _twice(made: Checkpointing, names: tuple[str, ...]) -> Finding:
    counter = next((n for n in names if n.endswith("num_batches_tracked")), names[0])
    on, off = made.moved(counter)
    return Finding(
        cause="statistics_updated_twice",
        level="advice",
        summary=f"{some(names)} {verb(names, 'move')} once more each time that a checkpoint runs its function again",
        measured=f"{counter} is {on:.6g} with checkpointing and {off:.6g} without; the gradients agree",
        shown_by="with every checkpoint as a plain call they end otherwise, and two runs with checkpointing agree",
        culprits=names,
        where=made.place,
        repair=(
            "keep norms with running statistics out of checkpointed functions, or give them a momentum of "
            "1 - sqrt(1 - momentum)"
        ),
    )


_FINDINGS = {
    "inputs_need_grad": _inputs_need_grad,
    "rng_not_preserved": _rng_not_preserved,
    "side_result_cut": _side_result_cut,
    "state_changed": _state_changed,
    "other_computation": _other_computation,
}
