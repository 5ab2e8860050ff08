"""Activation checkpointing changes what a step costs, and not its gradients.

What it does
    It runs the loop as it is, and with every checkpoint of torch's turned into a plain call of the same function, and
    compares the losses and the gradients that arrive: in float64, under one seed, from the same weights. With a knob
    ``checkpoint`` it compares both ways of the knob as well.

Why is this bad?
    The recomputation in the backward pass must repeat the forward pass. Where it draws other random numbers, or finds
    another state, gradients belong to a model that never made the loss; a re-entrant checkpoint whose inputs need no
    gradient gives none to the parameters inside it. Nothing is raised, and the loss still falls.

How it decides
    Both runs make the same operations, so that their gradients agree to rounding. Where they do not, one thing at a
    time is put right: checkpoints that no gradient can flow through become plain calls; then the states of all
    generators (torch's, python's, numpy's, those that the loop creates) are restored for each recomputation. What makes
    the gradients agree is the cause. Where nothing does, every call of torch under a checkpoint is compared with the
    same call in the recomputation; where all of them agree, re-entrant checkpoints are replaced by others. Calls are
    compared as well where torch refuses the plain ones because a tensor was changed before its backward pass: a
    checkpoint hides that. The knob's other way is compared without dropout, since it may draw in another order.
    Buffers that end with other values are advice: a batch norm that moves by its momentum twice a step forgets faster,
    and some libraries leave it so (torchvision's memory-efficient DenseNet). They are a fault where a knob
    ``checkpoint`` declares that checkpointing changes nothing. Nothing is said of a momentum of 1 - sqrt(1 - m) for an
    m of at most two digits, which is made for two updates, nor of counts of batches where momentum is not None: torch
    reads them for cumulative averages alone, and these come to the same.

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
    A recomputation of the project's own is seen only through the knob. Casts in a checkpointed function are for
    ``precision_parity``: in float64 there are none. Losses of later passes may differ, since a function that runs twice
    may advance generators and counters twice.

References
    https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.errors import DoesNotApply
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, direction, share, some, verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.numerics.checkpointing_equivalence.runs import Checkpointing, Verdict
    from pytest_trainloop.runs.evidence import Evidence

_EXPLAINS = ("overfit_one_batch", "update_ratio")

CAUSES = {
    "inputs_need_grad": Cause(
        proof="with the re-entrant checkpoints whose inputs require no grad as plain calls, the gradients are the same",
        repair="checkpoint(..., use_reentrant=False); or make the segment's inputs require grad "
        "(enable_input_require_grads)",
        explains=(
            "gradient_reaches_every_param:graph_cut",
            "gradient_reaches_every_param:parameter_unused",
            "every_param_moves:not_updated",
            *_EXPLAINS,
        ),
        change=("seen",),
    ),
    "rng_not_preserved": Cause(
        proof="with the states of generators restored for the recomputation, the gradients are the same",
        repair="draw before the checkpoint and pass the result as an argument, or draw from torch's own generator, "
        "which checkpoint() preserves",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "side_result_cut": Cause(
        proof="with non-reentrant checkpoints in place of re-entrant ones, the gradients are the same",
        repair="checkpoint(..., use_reentrant=False); or return from the function what the loss depends on (an "
        "auxiliary loss), instead of keeping it in a list or an attribute",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "state_changed": Cause(
        proof="the loss is the same, the gradients are not, also with every generator restored: the recomputation "
        "finds another state",
        repair="change no state inside a checkpointed function (counters, caches, buffers, its inputs): read it "
        "before, pass it as an argument, write it after",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "other_computation": Cause(
        proof="the loss of the first forward pass already differs, or gradients do without any random numbers",
        repair="run the same modules in the same order with the same arguments in both ways (masks, flags, the last "
        "layer), and decide nothing by torch.is_grad_enabled()",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "statistics_updated_twice": Cause(
        proof="gradients agree, and buffers end with other values than without checkpointing",
        repair="keep norms with running statistics out of checkpointed functions; or give them a momentum of "
        "1 - sqrt(1 - momentum), which settles it",
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=60)
def checkpointing_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.checkpointing_equivalence.moved_buffers import moved_otherwise
    from pytest_trainloop.checks.numerics.checkpointing_equivalence.runs import Checkpointing, checkpoint_knob

    if checkpoint_knob(evidence) is None and not any(call.grad_enabled for call in evidence.run().checkpoints):
        raise DoesNotApply(
            "no activation checkpointing was seen, and there is no knob checkpoint= that is True or False"
        )
    runs = evidence.shared(Checkpointing)
    verdict = runs.verdict()
    if verdict is not None:
        found = _FINDINGS[verdict.cause](verdict)
        yield replace(found, measured=_measured(verdict), where=found.where or verdict.place)
    elif buffers := moved_otherwise(evidence, runs.buffers_updated_twice()):
        yield _updated_twice(runs, buffers, declared=checkpoint_knob(evidence) is not None)
    else:
        runs.require_recomputation()


def _names(verdict: Verdict) -> tuple[str, ...]:
    return verdict.difference.names if verdict.difference is not None else ()


def _measured(verdict: Verdict) -> str:
    found = verdict.difference
    if verdict.plain_raised:
        return f"with checkpoints as plain calls fit raises {verdict.plain_raised[:160]}"
    if found is None:
        return f"with checkpointing fit raises {verdict.raised}; without it does not"
    on, off = found.loss
    loss = f"loss {on:.9g} with checkpointing and {off:.9g} without" if found.forward else f"loss {off:.9g} both ways"
    return (
        f"{loss}; the gradients differ by {share(found.gradients.difference)} of their size, "
        f"{direction(found.gradients.cosine)}, in {len(found.names)} parameters, {verdict.precision}"
    )


def _inputs_need_grad(verdict: Verdict) -> Finding:
    names = verdict.without_gradient or _names(verdict) or ("every parameter",)
    less = "a part of its gradient only" if not verdict.without_gradient and verdict.difference else "no gradient"
    return Finding(
        cause="inputs_need_grad",
        summary=f"{some(names)} {verb(names, 'get')} {less} under a re-entrant checkpoint whose inputs require no grad",
        shown_by="no input of some re-entrant checkpoints requires grad; with these alone as plain calls the gradients "
        "are those without checkpointing",
        culprits=names,
    )


def _rng_not_preserved(verdict: Verdict) -> Finding:
    names, repair = verdict.generators, ""
    if names == ("torch's generator",):
        repair = "leave preserve_rng_state=True (in a recomputation of your own, save and restore torch's state)"
    elif any("of its own" in name for name in names):
        repair = CAUSES["rng_not_preserved"].repair + ", or restore its state yourself"
    return Finding(
        cause="rng_not_preserved",
        summary=f"checkpointing does not restore {some(names)}: the recomputation in the backward pass draws other "
        "random numbers than those that made the loss",
        shown_by="both ways make the same loss, and without random numbers the same gradients"
        if verdict.own_recomputation
        else f"with {some(names)} restored for the recomputation, the gradients are those without checkpointing",
        culprits=names,
        repair=repair,
    )


def _side_result_cut(verdict: Verdict) -> Finding:
    names = _names(verdict) or ("checkpoint",)
    return Finding(
        cause="side_result_cut",
        summary=f"{some(names)} {verb(names, 'lose')} a part of the gradient under a re-entrant checkpoint: results "
        "that its function stores instead of returning, or takes in nested containers, have no history",
        shown_by="with non-reentrant checkpoints in their place the gradients are those without checkpointing, and the "
        "recomputation repeats the forward pass",
        culprits=names,
    )


def _state_changed(verdict: Verdict) -> Finding:
    other = verdict.other
    summary = "the recomputation of a checkpointed function finds another state than the forward pass"
    shown, culprits = "the first call that differs is not determined", _names(verdict) or ("checkpoint",)
    if other is not None:
        call = f"{other.op}()" + (f" in {other.module}" if other.module else "")
        shown = f"the recomputation gives another result of {call} (by up to {other.by:.2g})"
        if other.instead:
            shown = f"the recomputation calls {other.instead} in place of {call}"
        summary, culprits = f"{summary}: {call}", tuple(n for n in (other.module, other.op) if n)
    return Finding(
        cause="state_changed",
        summary=summary,
        shown_by=f"{shown}; ruled out: generators of random numbers, inputs that require no grad",
        culprits=culprits,
        where=other.place if other is not None else "",
        repair="call backward() before anything changes what the checkpointed function reads (an optimizer's step, a "
        "write in place)"
        if verdict.plain_raised
        else "",
    )


def _other_computation(verdict: Verdict) -> Finding:
    forward = verdict.difference is not None and verdict.difference.forward
    left_out = verdict.difference.without_gradient if verdict.difference is not None else ()
    only = f": {some(left_out)} {verb(left_out, 'get')} a gradient without it only" if left_out else ""
    return Finding(
        cause="other_computation",
        summary=f"the loop computes another loss with checkpointing than without{only}"
        if forward
        else "the loop's own recomputation gives other gradients for the same loss",
        shown_by="the loss of the first forward pass differs, before any recomputation"
        if forward
        else "the loss is the same and the gradients are not, also without random numbers",
        culprits=tuple(dict.fromkeys((*left_out, *_names(verdict)))) or ("loss",),
    )


_FINDINGS = {
    "inputs_need_grad": _inputs_need_grad,
    "rng_not_preserved": _rng_not_preserved,
    "side_result_cut": _side_result_cut,
    "state_changed": _state_changed,
    "other_computation": _other_computation,
}


def _updated_twice(runs: Checkpointing, names: tuple[str, ...], *, declared: bool) -> Finding:
    """A fault where the knob declares that checkpointing changes nothing, and more than counts differ."""
    values = [name for name in names if not runs.counts(name)]
    shown = next((n for n in names if n.endswith("num_batches_tracked")), names[0])
    on, off = runs.largest_at_the_end(shown)
    fault = declared and bool(values)
    also = "" if fault or not values else "; a test with a knob checkpoint= that is True or False fails for it"
    return Finding(
        cause="statistics_updated_twice",
        level="fault" if fault else "advice",
        summary=f"{some(names)} {be(names)} updated once more each time that a checkpoint recomputes its function",
        measured=f"{shown} is {on:.6g} with checkpointing and {off:.6g} without; the gradients agree",
        shown_by="with every checkpoint as a plain call they end with other values, and two runs with checkpointing "
        "agree",
        culprits=names,
        where=runs.place,
        repair=CAUSES["statistics_updated_twice"].repair + also,
    )
