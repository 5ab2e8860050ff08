"""What ``gradient_reaches_every_param`` says of each fault. Plain data, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.consequences import TRAINING
from pytest_trainloop.finding import Finding
from pytest_trainloop.wording import be, some, them, they, verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import Cut
    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import Parameter, Record

_OPERATIONS = {"data": ".data", "__float__": "float()", "__int__": "int()", "__array__": "numpy", "numpy": ".numpy()"}


def of_untrainable_model(parameters: Sequence[Parameter]) -> Finding:
    return Finding(
        cause="nothing_trainable",
        summary=f"nothing trains: none of the {len(parameters)} parameters requires grad",
        measured=f"0 of {len(parameters)} parameters require grad",
        shown_by="requires_grad is False on every parameter when the loop starts, and no gradient arrives anywhere",
        culprits=tuple(p.name for p in parameters[:8]),
    )


def of_frozen_by_mistake(names: tuple[str, ...], declared: Sequence[str]) -> Finding:
    return Finding(
        cause="frozen_by_mistake",
        summary=f"{some(names)} {be(names)} frozen and not among what frozen= names: {', '.join(declared)}",
        measured=f"{len(names)} weights of layers do not require grad and lie below none of the declared paths",
        shown_by="their modules run in the training forward pass, and requires_grad is False on them",
        culprits=names,
    )


def of_frozen_adapters(record: Record, adapters: Sequence[Parameter]) -> Finding:
    others = sum(p.requires_grad for p in record.parameters)
    return Finding(
        cause="adapters_frozen",
        summary=(
            f"the model has {len(adapters)} adapter parameters and none of them requires grad: the adapters never train"
        ),
        measured=f"0 of {len(adapters)} adapter parameters require grad; {others} others do",
        shown_by="requires_grad is False on every adapter when the loop starts",
        culprits=tuple(p.name for p in adapters[:8]),
    )


def of_trained_base(base: Sequence[Parameter], adapters: int) -> Finding:
    names = tuple(p.name for p in base)
    return Finding(
        cause="base_left_trainable",
        summary=(
            f"{some(names)} {verb(names, 'train')} together with the adapters on {them(names)}: the base was never "
            "frozen"
        ),
        measured=(
            f"{len(base)} adapted weights require grad, get gradients and are held by an optimizer; {adapters} adapter "
            "parameters"
        ),
        shown_by="the adapted weight and its adapter both receive gradients",
        culprits=names,
    )


def of_checkpoint(behind: Sequence[Parameter], change: float) -> Finding:
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
    )


def of_cut(record: Record, names: tuple[str, ...], change: float, cut: Cut | None, *, refused: bool) -> Finding:
    """A cut graph, by the operation that cuts it if one was found. ``refused``: torch refused the backward pass."""
    measured = (
        f"0 gradients arrived in {len(record.autograd_passes())} backward passes; moving {them(names)} changes the "
        f"loss by {change:.1e}"
    )
    summary = f"{some(names)} {verb(names, 'get')} no gradient although the loss depends on {them(names)}"
    if cut is None:
        return Finding(
            cause="graph_cut",
            summary=summary,
            measured=measured,
            shown_by=(
                "no operation seen restores the gradient; tried without: detach, .data, no_grad, and values taken out "
                "of tensors in torch calls"
            ),
            culprits=names,
            where=str(record.raised.place) if record.raised else "",
            repair=(
                "look for a value that leaves torch or comes from another thread on the way from these parameters to "
                "the loss"
            ),
            explains=TRAINING,
        )
    candidate = cut.candidate
    off = candidate.kind == "grad_off" and cut.gradient is not None
    op = "no_grad" if candidate.kind == "grad_off" else _OPERATIONS.get(candidate.op, f"{candidate.op}()")
    module = f" in {candidate.module}" if candidate.module else ""
    if candidate.kind == "custom":
        shown = f"a gradient arrives at the output of {candidate.op}, and its backward() returns none for an input"
    elif cut.gradient is not None:
        shown = (
            f"in a run {'with gradients switched on' if off else f'without the {op}'} here, a gradient (largest entry "
            f"{cut.gradient:.2g}) reaches {names[0]}"
        )
    else:
        shown = (
            f"likely: moving the result of {op} here changes the loss by {cut.change:.1e}, and no gradient passes there"
        )
    how = f"the forward pass{module} runs with gradients switched off" if off else f"the graph is cut by {op}{module}"
    return Finding(
        cause="no_grad_forward" if off else "graph_cut",
        summary=f"{summary}: {how}" + (", and torch refuses the backward pass" if refused else ""),
        measured=measured,
        shown_by=shown,
        culprits=names,
        where=str(candidate.place),
        repair="" if off else f"keep the tensor and its history on the loss path; use {op} for logging only",
    )


_NO_RESULT = (
    "the parameter enters an operation in the training forward pass, and nothing that is backpropagated depends on the "
    "result"
)


def of_unused_result(names: tuple[str, ...]) -> Finding:
    return Finding(
        cause="parameter_unused",
        summary=f"{some(names)} {be(names)} computed with in every forward pass, and the result never reaches the loss",
        measured=f"0 gradients arrived; moving {them(names)} does not change the loss",
        shown_by=_NO_RESULT,
        culprits=names,
    )


def of_result_given_out(names: tuple[str, ...], target: str, frozen: Sequence[str] | None) -> Finding:
    """``target`` is the tensor of the batch that fits the result and that nothing reads, if there is one."""
    why = f"nothing reads {target}, which has the shape of its target" if target else ""
    if frozen is not None and not target:
        why = _not_declared(names, frozen)
    return Finding(
        cause="parameter_unused",
        level="fault" if why else "advice",
        summary=f"{some(names)} {be(names)} computed with in every forward pass, and no loss uses the result"
        + (f": {why}" if why else ""),
        measured=f"0 gradients arrived; moving {them(names)} does not change the loss",
        shown_by=_NO_RESULT + (f"; {why}" if why else ""),
        culprits=names,
        repair=f"add the loss of that result, with {target} as target; or name the module in frozen="
        if target
        else "add the loss of that result, or take the module out of the optimizer; or name it in frozen="
        if why
        else "add the loss of that result, or take the module out of the optimizer; "
        'frozen=("...",) says that it is meant, frozen=() that all must train',
    )


def of_unused(names: tuple[str, ...], frozen: Sequence[str] | None) -> Finding:
    """``frozen`` is what is declared not to train, where all else must, whatever batches come."""
    why = "" if frozen is None else _not_declared(names, frozen)
    return Finding(
        cause="parameter_unused",
        level="fault" if why else "advice",
        summary=f"{some(names)} {be(names)} held by an optimizer and took no part in these batches"
        + (f": {why}" if why else ""),
        measured=f"no gradient arrived and no operation used {them(names)}",
        shown_by=why,
        culprits=names,
        repair="call the module and use its result, or take it out of the optimizer; or name it in frozen="
        if why
        else 'give batches= that use it; frozen=("...",) says that it is meant to stay, frozen=() that all must train',
    )


def _not_declared(names: tuple[str, ...], frozen: Sequence[str]) -> str:
    return f"frozen={tuple(frozen)} declares what does not train, and does not name {them(names)}"


def of_zero_gradient(names: tuple[str, ...]) -> Finding:
    return Finding(
        cause="gradient_vanished",
        level="advice",
        summary=f"{some(names)} {verb(names, 'get')} only gradients that are exactly zero",
        measured=f"every gradient that arrived is zero in every entry, and moving {them(names)} changes the loss",
        shown_by=(
            "not determined; ruled out: rounding, clamping, units that are off for all data, normalisation over one "
            "entry"
        ),
        culprits=names,
        repair=(
            "look at what multiplies the result: a gate at zero, an expert without tokens, a group with learning rate "
            "0 behind it"
        ),
    )


def of_saddle(names: tuple[str, ...], gradient: float) -> Finding:
    return Finding(
        cause="dead_activation",
        summary=(
            f"{some(names)} {verb(names, 'start')} at exactly zero together with what multiplies {them(names)}: no "
            "gradient can ever leave that point"
        ),
        measured="every gradient that arrived is zero in every entry",
        shown_by=f"with all weights moved a little a gradient (largest entry {gradient:.2g}) reaches {names[0]}",
        culprits=names,
        repair="initialise only one of the factors to zero (LoRA: B at zero, A random)",
    )


def of_zeroed(names: tuple[str, ...], cut: Cut, level: Level) -> Finding:
    constant = cut.candidate.kind == "constant"
    op = cut.candidate.op.rstrip("_")
    module = f" in {cut.candidate.module}" if cut.candidate.module else ""
    repair = ""
    if constant and "softmax" in op:
        repair = "a softmax over one entry is always 1: check its dim, or use a sigmoid"
    elif constant and "norm" in op:
        repair = "a norm over one entry is always its bias: check the normalised shape"
    return Finding(
        cause="dead_activation" if constant else "gradient_vanished",
        level=level,
        summary=f"{some(names)} {verb(names, 'get')} only zero gradients: {op}{module} "
        + ("returns the same for every input" if constant else "has a slope of zero there"),
        measured="every gradient that arrived is zero in every entry",
        shown_by=(
            f"in a run in which {op} gives back its input here, a gradient (largest entry {cut.gradient or 0.0:.2g}) "
            f"reaches {names[0]}"
        ),
        culprits=names,
        where=str(cut.candidate.place),
        repair=repair,
    )
