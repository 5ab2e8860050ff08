"""What ``gradient_reaches_every_param`` says of each fault. Plain data, no torch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.consequences import TRAINING
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import ATEN_COMPARISONS
from pytest_trainloop.wording import be, count, some, them, they, verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import Cut
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.stopped_side import OtherSide
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.uses import Wanted
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.tracing.row_tape import TapedCall

_OPERATIONS = {"data": ".data", "__float__": "float()", "__int__": "int()", "__array__": "numpy", "numpy": ".numpy()"}


def of_untrainable_model(parameters: Sequence[Parameter]) -> Finding:
    return Finding(
        cause="nothing_trainable",
        summary=f"nothing trains: none of the {len(parameters)} parameters requires grad",
        measured=f"0 of {len(parameters)} parameters require grad",
        shown_by="requires_grad is False on every parameter when the loop starts, and no gradient arrives anywhere",
        culprits=tuple(p.name for p in parameters),
    )


def of_frozen_by_mistake(names: tuple[str, ...], declared: Sequence[str]) -> Finding:
    return Finding(
        cause="frozen_by_mistake",
        summary=f"{some(names)} {be(names)} frozen and not among what frozen= names: {some(declared, most=4)}",
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
        culprits=tuple(p.name for p in adapters),
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


def of_cut(
    record: Record,
    names: tuple[str, ...],
    change: float,
    cut: Cut | None,
    wanted: Wanted | None = None,
    side: OtherSide | None = None,
    *,
    refused: bool,
) -> Finding:
    """A cut graph, by the operation that cuts it if one was found. ``wanted``: its result is used twice, and once
    rightly. ``side``: a comparison that takes it on the other side. ``refused``: torch refused the backward pass."""
    measured = f"0 gradients arrived there in {count(len(record.autograd_passes()), 'backward pass')}"
    summary = f"{some(names)} {verb(names, 'get')} no gradient"
    if change:  # a loss of whole numbers may stay as it is where its parameters move a little
        measured += f"; moving {them(names)} changes the loss by {change:.1e}"
        summary += f" although the loss depends on {them(names)}"
    raised_at = str(record.raised.place) if refused and record.raised else ""
    ending = ", and torch refuses to backpropagate a loss without history" if refused else ""
    if cut is None:
        return Finding(
            cause="graph_cut",
            summary=summary + ending,
            measured=measured,
            shown_by=(
                "no operation seen restores the gradient; tried without: detach, .data, no_grad, and values taken out "
                "of tensors in torch calls"
            ),
            culprits=names,
            where=raised_at or (str(record.raised.place) if record.raised else ""),
            repair=(
                "look for a value that leaves torch or comes from another thread on the way from these parameters to "
                "the loss"
            ),
            explains=TRAINING,
        )
    candidate = cut.candidate
    off = candidate.kind == "grad_off" and cut.gradient is not None
    module = f" in {candidate.module}" if candidate.module else ""
    how = (
        f"the forward pass{module} runs with gradients switched off"
        if off
        else f"the graph is cut by {_op(cut)}{module}"
    )
    if cut.others:
        how += f", and at {len(cut.others)} more line{'s' if len(cut.others) > 1 else ''} on other paths"
    if wanted is not None:
        how = f"the loss is computed from what {_op(cut)} gave for another loss"
    lines = [wanted.wrong] if wanted else [candidate.place, *(c.place for c in cut.others)]
    return Finding(
        cause="no_grad_forward" if off else "graph_cut",
        summary=f"{summary}: {how}{ending}",
        measured=measured,
        shown_by=_shown(cut, names)
        if wanted is None
        else f"the same tensor is used for the loss of {wanted.other}, which has a history by others, and again here",
        culprits=names,
        where=raised_at or str(candidate.place),
        change="\n".join(dict.fromkeys(map(str, lines))),
        repair=_repair_of_cut(cut, wanted) if side is None else of_other_side(_op(cut), candidate.place, side),
        tried=_tried(cut, wanted) if side is None else _MOVED,
        do_not=_do_not(cut, wanted, side),
    )


def of_teacher(found: Finding, module: str) -> Finding:
    """The same of a module that runs without gradients and gives targets only."""
    return replace(
        found,
        level="advice",
        summary=f"{module} runs without gradients and gives targets only, and an optimizer holds its weights",
        repair=f"leave the weights of {module} out of the optimizer: weight decay would move them without a gradient; "
        f"frozen=({module!r},) says that it is meant",
        change="",
        tried="",
    )


_MOVED = "with the other side detached in its place every parameter gets a gradient; learning was not tried"


def _do_not(cut: Cut, wanted: Wanted | None, side: OtherSide | None) -> str:
    if wanted is not None:
        return f"remove the {_op(cut)} at {cut.candidate.place}: the loss of {wanted.other} is meant to stop there"
    if side is not None:
        return f"just delete the {_op(cut)}: both sides then train, and the outputs may collapse to a constant"
    return ""


_OPERAND = r"[\w.]+(?:\([^()]*\)|\[[^\[\]]*\])?"
_SIDES = re.compile(rf"\((?:({_OPERAND})\.detach\(\), ({_OPERAND})|({_OPERAND}), ({_OPERAND})\.detach\(\))(?=[,)])")


def of_other_side(op: str, cut_at: Place, side: OtherSide) -> str:
    """The line with the stop-gradient on the other side; in words where the line does not hold both sides."""
    written = cut_at.code
    if cut_at == side.place:
        written = _SIDES.sub(lambda m: f"({m[1]}, {m[2]}.detach()" if m[1] else f"({m[3]}.detach(), {m[4]}", written)
    if written != cut_at.code:
        return f"{written}\nthe gradient stops on the other side of {side.op}"
    return f"detach the other side of {side.op} ({side.place.file}:{side.place.line}), and leave this {op} out"


def _op(cut: Cut) -> str:
    candidate = cut.candidate
    return "no_grad" if candidate.kind == "grad_off" else _OPERATIONS.get(candidate.op, f"{candidate.op}()")


def _shown(cut: Cut, names: Sequence[str]) -> str:
    if cut.candidate.kind == "custom":
        return f"a gradient arrives at the output of {cut.candidate.op}, and its backward() returns none for an input"
    if cut.gradient is None:
        return (
            f"likely: moving the result of {_op(cut)} here changes the loss by {cut.change:.1e}, and no gradient "
            "passes there"
        )
    off = cut.candidate.kind == "grad_off"
    how = "with gradients switched on" if off else f"without the {_op(cut)}"
    every = " and the others" if cut.others else ""
    return f"in a run {how} here{every}, a gradient (largest entry {cut.gradient:.2g}) reaches {names[0]}"


def _tried(cut: Cut, wanted: Wanted | None) -> str:
    """Leaving the operation out is the counterfactual run itself."""
    if cut.gradient is None or cut.candidate.kind == "custom":
        return ""
    return f"without the {_op(cut)} the gradient arrives" if wanted is None else ""


def _repair_of_cut(cut: Cut, wanted: Wanted | None) -> str:
    code, op = cut.candidate.place.code, cut.candidate.op
    if wanted is not None:
        return (
            f"use the tensor from before the {_op(cut)} here: call the model anew, or keep both (fake for this loss, "
            "fake.detach() for the other)"
        )
    if ".sample(" in code:
        return (
            f"{code.replace('.sample(', '.rsample(')}\nrsample() has a gradient for its parameters, sample() has none"
        )
    if cut.candidate.kind == "grad_off" and "set_grad_enabled" in code:
        return (
            "let gradients be on in the training forward pass: make the condition true there, or leave the switch out"
        )
    if cut.candidate.kind == "grad_off" and cut.gradient is not None:
        return "move the training forward pass out of torch.no_grad() / inference_mode()"
    if op == "detach" and re.search(r"-.*\)\.detach\(\)|\.detach\(\) *[-+]|[-+] *\w+\.detach\(\)", code):
        return "a straight-through step is x + (f(x) - x).detach(): only x, outside of detach(), carries the gradient"
    if op in ("item", "__float__", "tolist", "numpy", "__array__", "tensor", "as_tensor"):
        return f"leave {_op(cut)} out here: compute with the tensor itself, and use {_op(cut)} for logging only"
    if cut.candidate.kind == "custom":
        return f"return a gradient for every input that needs one from {op}.backward()"
    if op in ATEN_COMPARISONS or op in ("argmax", "argmin", "round", "eq", "ne", "sign", "topk", "sort"):
        return f"{op}() has no gradient: use a loss of the scores themselves (cross_entropy in place of accuracy)"
    if op == "detach" and ".detach()" in code:
        written = code.replace(".detach()", "")
        empty = re.fullmatch(r"([\w.]+) = \1", written)
        alternative = f"or use {_op(cut)} for logging only"
        return f"remove this line, {alternative}" if empty else f"{written}\n{alternative}"
    return f"keep the tensor and its history on the loss path; use {_op(cut)} for logging only"


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


def of_left_out(record: Record, names: tuple[str, ...], call: TapedCall) -> Finding:
    """A value that is computed of a parameter and left out before the loss, in every batch that was watched."""
    passes = count(len(record.autograd_passes()), "backward pass")
    return Finding(
        cause="parameter_unused",
        level="advice",
        summary=f"{some(names)} {be(names)} computed with, and {call.named} leaves the result out of the loss",
        measured=f"gradients of exactly 0 in {passes}; moving {them(names)} does not change the loss",
        shown_by=f"what {call.named} is given changes with {them(names)}, and what it gives does not",
        culprits=(*names[:8], call.name),
        where=str(call.place),
        change=str(call.place),
        repair="look at the mask, the index or the weight on this line: is it the wrong way round, or 0 for all of this "
        'data? frozen=("...",) says that it is meant',
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


def of_uncalled(record: Record, name: str, parameters: tuple[str, ...], *, moved: bool, made: str) -> Finding:
    """``made`` is the line that made the module."""
    first = next(iter(record.backwards()), None)
    called = f"not called in {count(record.rounds, 'optimizer step')}"
    how = f"is updated and {called}" if moved else f"is {called}"
    return Finding(
        cause="module_uncalled",
        level="advice",
        summary=f"{name}, which model= names, {how}: no loss of these depends on it",
        measured=f"0 calls in training, and moving its {len(parameters)} parameters does not change the loss",
        shown_by="no module in it was called, with or without gradients" + (f"; it was made at {made}" if made else ""),
        culprits=(name,),
        where=str(first.place) if first else "",
        repair=f"call {name}(x) under torch.no_grad() before this line and put its output in the loss; or leave it out "
        "of model=",
    )


def _not_declared(names: tuple[str, ...], frozen: Sequence[str]) -> str:
    return f"frozen={tuple(frozen)} declares what does not train, and does not name {them(names)}"


def of_zero_gradient(names: tuple[str, ...], slope: float) -> Finding:
    """``slope`` is that of the loss around their values, relative to both; 0 where it is flat."""
    ruled_out = "ruled out: rounding, clamping, units that are off for all data, normalisation over one entry"
    flat = f"around {'their values' if len(names) > 1 else 'its value'} the loss is flat, or a hook zeroes the gradient"
    return Finding(
        cause="gradient_vanished",
        level="fault" if slope else "advice",
        summary=f"{some(names)} {verb(names, 'get')} only gradients that are exactly zero"
        + (", and the loss has a slope there" if slope else ""),
        measured=f"every gradient that arrived is zero in every entry, and moving {them(names)} changes the loss",
        shown_by=f"central differences with two steps give one slope ({slope:.2g} of the loss, float64); {ruled_out}"
        if slope
        else f"{flat}; {ruled_out}",
        culprits=names,
        repair="look for a backward() of your own that returns zeros, or a factor that is zero in backward; or name "
        f"{them(names)} in frozen="
        if slope
        else "look at what multiplies the result (a gate at zero, an expert without tokens), or give batches= that use "
        'it; frozen=("...",) says that it is meant to stay',
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


def of_zeroed(names: tuple[str, ...], cut: Cut, *, one_key: bool, bound: bool, learned: bool) -> Finding:
    """``one_key``: a softmax over the one key that this batch has; ``bound``: one number that a clamp holds, and
    ``learned`` if it may have come there in training. Both may be meant."""
    constant = cut.candidate.kind == "constant"
    op = cut.candidate.op.rstrip("_")
    module = f" in {cut.candidate.module}" if cut.candidate.module else ""
    repair = ""
    if constant and "softmax" in op:
        repair = "a softmax over one entry is always 1: check its dim, or use a sigmoid"
    elif constant and "norm" in op:
        repair = "a norm over one entry is always its bias: check the normalised shape"
    if one_key:
        repair = "give batches= with more than one key; where no batch ever has more, these weights never train"
    elif bound:
        repair = (
            f"initialise it within its bounds; or name it in frozen=({names[0]!r},), if it has reached them for good"
        )
    return Finding(
        cause="dead_activation" if constant else "gradient_vanished",
        level="advice" if one_key or (bound and learned) else "fault",
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
        tried="" if repair else f"with {op} giving back its input in the backward pass the gradient arrives",
    )
