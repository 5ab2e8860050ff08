"""What is said of a difference from the baseline."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.guard.baseline.layers import said
from pytest_trainloop.finding import Finding
from pytest_trainloop.wording import be, count, some, verb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.baselines.trajectory import Step
    from pytest_trainloop.checks.guard.baseline.facts import Fact
    from pytest_trainloop.checks.guard.baseline.first import First
    from pytest_trainloop.checks.guard.baseline.locating import Apart
    from pytest_trainloop.checks.guard.baseline.start import Begun

COMMAND = "pytest --trainloop --trainloop-only=baseline --trainloop-update TEST"
"""What accepts the difference; ``TEST`` stands for the node id."""

ACCEPT = f"accept what is meant: {COMMAND}"


def of_fact(fact: Fact, first: First | None, precision: str, *, compared: bool = True) -> Finding:
    """A fact, with the place at which it shows; not ``compared``: the numbers of the steps were not."""
    if first is not None:
        shown = f"the numbers differ first {place(first)}"
    elif compared and fact.shown:
        shown = fact.shown
    elif compared:
        shown = "the recorded steps do not show it yet: their numbers are those of the baseline"
    else:
        shown = "it shows before the first step; from other weights the steps cannot be compared"
    measured = fact.measured if first is None else f"{fact.measured}; {numbers(first, precision)}"
    return Finding(
        cause=fact.cause,
        summary=fact.summary,
        measured=measured,
        shown_by=shown,
        culprits=fact.culprits,
        where=fact.where or (first.step.where if first is not None and fact.cause != "parameters_differ" else ""),
        repair=f"{fact.repair or 'as it was'}; or {ACCEPT}" if fact.repair else "",
    )


def unseen(fact: Fact) -> Finding:
    """A note on what the recorded steps cannot show."""
    return Finding(
        cause=fact.cause,
        level="note",
        summary=f"{fact.summary}: {fact.unseen}",
        measured=fact.measured,
        shown_by="the recorded steps do not need it: gradients, rates and updates are those of the baseline",
        culprits=fact.culprits,
        where=fact.where,
        repair=f"call it again, or {ACCEPT}",
    )


def of_first(first: First, precision: str) -> Finding:
    """The first place that differs, where nothing else explains it."""
    return _BY_KIND[first.kind](first, precision)


def place(first: First) -> str:
    """``at step 2, in the update of head.weight``."""
    what = {
        "data": "in the batch",
        "output": f"in the output of {first.names[0]}",
        "loss": "in the loss",
        "gradient": f"in the gradient of {some(first.names)}",
        "rate": f"in the learning rate of {some(first.names)}",
        "update": f"in the update of {some(first.names)}",
        "buffer": f"in the buffer {some(first.names)}",
    }[first.kind]
    return f"at step {first.step.number}, {what}"


def numbers(first: First, precision: str) -> str:
    """The difference against its bound."""
    if first.kind in ("data",) and not first.apart:
        return f"step {first.step.number}"
    return f"relative difference {first.apart:.2g} in {precision}, bound {first.bound:.1g}"


def _data(first: First, _precision: str) -> Finding:
    data = first.data
    text = data.text if data is not None else "other values"
    before = (
        ""
        if first.step.number == 1
        else f"; the batches of the {count(first.step.number - 1, 'step')} before are the same"
    )
    order = f"; {data.rows}" if data is not None and data.rows else ""
    return Finding(
        cause="data_differs",
        summary=f"{first.names[0]} has {text} at step {first.step.number}{order}",
        measured=f"relative difference {first.apart:.2g}" if first.apart else text,
        shown_by=f"the batch differs before the model has seen it{before}",
        culprits=first.names[:1],
    )


def _output(first: First, precision: str) -> Finding:
    call = first.call
    if call is None:
        raise ValueError("a difference in an output has its call")
    path = call.path or "the model"
    other = f" ({call.new.kind}; in the baseline {call.old.kind})" if call.old.kind != call.new.kind else ""
    if call.new.training != call.old.training:
        other += f" (in {_mode(call.new.training)} mode; in the baseline in {_mode(call.old.training)} mode)"
    agree = f"{some(call.agree, most=4)} {verb(call.agree, 'give')} what {'they' if len(call.agree) > 1 else 'it'} gave"
    before = f"; before it {agree}" if call.agree else "; it is the first module that is called"
    options = said(first.options, path)
    if call.times[0] != call.times[1]:
        return _called_again(first, call, precision)
    where = ""
    headline = f"{path} {'is given something else' if call.given_too else 'gives another output'}"
    headline = f"{options}: {headline}" if options else headline
    if call.new.training != call.old.training:
        where = _line(first.step, ("train()",) if call.new.training else ("eval()",), ends=True)
    elif call.given_too and call.inside is None:
        where = _line(first.step, ("forward of",))
    if call.given_too and call.inside is None:
        shown = f"what the loop gives to the model differs{before}".replace("; it is", f"; {path} is")
        headline = f"the model is called with something else: {path} is given other values"
    elif call.given_too:
        between = "between" if call.agree else "between the batch and it"
        shown = f"{path} is already given something else{before}: the change lies {between}"
    else:
        shown = f"{path} is given what it was given, and gives something else{before}"
        if first.step.number > 1:
            shown += f"; after step {first.step.number - 1} its weights were those of the baseline: what it computes "
            shown += "changed, or something writes to its weights between two steps"
    return Finding(
        cause="output_differs",
        summary=f"{headline} at step {first.step.number}{other}",
        measured=f"|output| {call.new.gave.norm:.4g}, {call.old.gave.norm:.4g} in the baseline; "
        f"{numbers(first, precision)}",
        shown_by=shown,
        culprits=(path,),
        where=where,
    )


def _called_again(first: First, call: Apart, precision: str) -> Finding:
    """A module that is called another number of times in a step, so that it sees other rows in each call."""
    then, now = (_models(step) for step in (first.before, first.step))
    what, (then, now) = ("the model", (then, now)) if then != now else (call.path, call.times)
    why = "what it makes of all rows together, or draws at random, is another one"
    if call.new.training and "Dropout" in call.new.kind:
        why = f"{call.path} draws other random numbers"
    elif call.new.training and "BatchNorm" in call.new.kind:
        why = f"{call.path} takes the statistics of other rows"
    return Finding(
        cause="output_differs",
        summary=f"{what} is called {_times(now)} at step {first.step.number}; in the baseline {_times(then)}: {why}",
        measured=f"{count(call.times[1], 'call')} of {call.path}, {call.times[0]} in the baseline; "
        f"{numbers(first, precision)}",
        shown_by=f"{call.path} is the first module whose outputs, of all calls of the step together, are others",
        culprits=(call.path,),
        where=_line(first.step, ("forward of",)) or first.step.where,
        repair=f"call the model as often as the baseline does, or compare with dropout off; or {ACCEPT}",
    )


def _models(step: Step) -> int:
    """The calls of models from outside any module."""
    whats = [event.what for event in step.events or () if event.what.startswith("forward of")]
    return sum(int(re.sub(r".* x (?=\d+$)", "", what)) if re.search(r" x \d+$", what) else 1 for what in whats)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _loss(first: First, precision: str) -> Finding:
    factor = _factor(first.ratio)
    calls = [_losses(step) for step in (first.before, first.step)]
    changed = (
        ""
        if calls[0] == calls[1]
        else f"; called are {calls[1] or 'none of torch'}, in the baseline {calls[0] or 'none of torch'}"
    )
    where = _line(first.step, ("backward",)) if not calls[1] else _line(first.step, tuple(calls[1].split(", ")))
    passes = ""
    if len(first.before.losses) != len(first.step.losses):
        passes = f"; {count(len(first.step.losses), 'backward pass')}, {len(first.before.losses)} in the baseline"
    called = calls[1].partition("(")[0] if calls[1] and ", " not in calls[1] else ""
    unasked = f"; {some(first.gone)} {be(first.gone)} no longer called" if first.gone else ""
    return Finding(
        cause="loss_differs",
        summary=f"the loss{f' ({called})' if called else ''} of step {first.step.number} is {first.new:.6g}; in the "
        f"baseline {first.old:.6g}{factor}{unasked}",
        measured=f"{first.new:.6g} against {first.old:.6g}{_ratio(first.ratio)}; {numbers(first, precision)}{passes}",
        shown_by=f"batch and outputs of all modules{' that are called' if first.gone else ''} are those of the "
        f"baseline{changed}",
        culprits=(*first.gone, "loss"),
        where=where or first.step.where,
    )


def _losses(step: Step) -> str:
    names = [event.what for event in step.events or () if "(" in event.what and "_" in event.what]
    known = [what for what in names if not what.startswith(("clip_", "forward", "zero_", "scaler"))]
    return ", ".join(dict.fromkeys(what for what in known if ".step" not in what and ".train" not in what))


def _gradient(first: First, precision: str) -> Finding:
    own, step = first.names, first.step
    if first.new == 0.0 or first.old == 0.0:
        has = "no gradient" if first.new == 0.0 else "a gradient"
        text = f"{some(own)} {verb(own, 'get')} {has} at step {step.number}"
        text += "" if first.new == 0.0 else ", and none in the baseline"
    else:
        of = "every parameter" if not first.agree and len(own) > 1 else some(own)
        text = f"the gradient of {of} differs from the baseline at step {step.number}{_factor(first.ratio)}"
    rest = (
        f"; the gradients of {some(first.agree, most=4)} are the same" if first.agree else "; no gradient is the same"
    )
    if clip := _clip(first):
        text = f"{clip}: {text}"
    return Finding(
        cause="gradient_differs",
        summary=text,
        measured=f"|gradient| {first.new:.4g}, {first.old:.4g} in the baseline{_ratio(first.ratio)}; "
        f"{numbers(first, precision)}",
        shown_by=f"batch, outputs of all modules and loss of step {step.number} are those of the baseline{rest}",
        culprits=own,
        where=_line(step, ("clip_",) if clip else ("backward", "autograd")) or step.where,
        repair=f"hand the clip the parameters that it was given in the baseline; or {ACCEPT}" if clip else "",
    )


def _clip(first: First) -> str:
    """What a clip computed, where it found another norm than in the baseline and all gradients differ by one factor."""
    was, now = first.before.clips, first.step.clips
    if (
        first.ratio is None
        or first.agree
        or len(was) != 1
        or len(now) != 1
        or math.isclose(was[0], now[0], rel_tol=1e-9)
    ):
        return ""
    if was[0] and math.isclose(now[0] / was[0], first.ratio, rel_tol=1e-6):
        return ""  # the gradients differ before it
    return f"clip_grad_norm_() finds a norm of {now[0]:.4g} where it found {was[0]:.4g}"


def _rate(first: First, _precision: str) -> Finding:
    return Finding(
        cause="rate_differs",
        summary=f"the learning rate of step {first.step.number} is {first.new:.6g}; in the baseline {first.old:.6g}",
        measured=f"{first.new:.6g} against {first.old:.6g} for {count(len(first.names), 'parameter')}"
        f"{_ratio(first.ratio)}",
        shown_by=f"the gradients of step {first.step.number} are those of the baseline, and so is all before it",
        culprits=first.names,
        where=first.step.where,
    )


def _update(first: First, precision: str) -> Finding:
    own = first.names
    name = own[0]
    sizes = ""
    if name in first.step.updates and name in first.before.updates:
        sizes = f"|update of {name}| {first.step.updates[name]:.4g}, {first.before.updates[name]:.4g} in the baseline; "
    return Finding(
        cause="update_differs",
        summary=f"step {first.step.number} moves {some(own)} otherwise than in the baseline",
        measured=f"{sizes}{numbers(first, precision)}",
        shown_by="the gradients and the learning rate are those of the baseline, and so are class and options of the "
        "optimizer",
        culprits=own,
        where=first.step.where,
    )


def _buffer(first: First, precision: str) -> Finding:
    options = said(first.options, first.names[0].rpartition(".")[0])
    then, now = (_models(step) for step in (first.before, first.step))
    again = f"the model is called {_times(now)} a step, in the baseline {_times(then)}" if then != now else ""
    why = options or again
    return Finding(
        cause="buffer_differs",
        summary=(f"{why}: " if why else "")
        + f"{some(first.names)} {be(first.names)} another one after step {first.step.number}",
        measured=f"|{first.names[0]}| {first.new:.4g}, {first.old:.4g} in the baseline; {numbers(first, precision)}",
        shown_by=f"gradients and updates of step {first.step.number} are those of the baseline",
        culprits=first.names,
        where=_line(first.step, ("forward of",)) if again and not options else "",
    )


_BY_KIND: dict[str, Callable[[First, str], Finding]] = {
    "data": _data,
    "output": _output,
    "loss": _loss,
    "gradient": _gradient,
    "rate": _rate,
    "update": _update,
    "buffer": _buffer,
}


def of_start(start: Begun) -> Finding:
    """Weights that begin with other values."""
    if start.scaled:
        own = start.scaled
        return Finding(
            cause="initial_weights_differ",
            summary=f"{some(own)} {verb(own, 'begin')} with another distribution than in the baseline",
            measured=start.text,
            shown_by=f"mean and spread are further apart than two draws of one distribution; {_rest(start)}",
            culprits=own,
        )
    own = start.drawn
    return Finding(
        cause="initial_weights_differ",
        summary=f"{some(own)} {verb(own, 'begin')} with other random numbers than in the baseline",
        measured=f"{count(len(own), 'tensor')}, mean and spread as in the baseline",
        shown_by=f"the first tensor that differs, in the order of construction, is {own[0]}: before it a random number "
        "is drawn more or less, or modules are built in another order",
        culprits=own,
        repair=(
            "build modules in the order of the baseline, or load the weights that it began with; the steps cannot be "
            f"compared from other weights; or {ACCEPT}"
        ),
    )


def _rest(start: Begun) -> str:
    if not start.drawn:
        return "all other weights begin as in the baseline"
    return f"{some(start.drawn)} {verb(start.drawn, 'begin')} with other random numbers of the same distribution"


def renamed(texts: Sequence[str], names: Sequence[str]) -> Finding:
    """A note on names that a refactor changed."""
    return Finding(
        cause="renamed",
        level="note",
        summary=f"the same tensors under other names: {some(texts, most=6)}",
        measured=f"{count(len(names), 'tensor')} under another name or in other pieces",
        shown_by="they begin with the same values",
        culprits=tuple(names),
        repair=f"{COMMAND} writes the new names into the baseline",
    )


def _factor(ratio: float | None) -> str:
    """``, 8 times as large`` where the factor is a whole number or its inverse."""
    if ratio is None:
        return ""
    for value, text in ((ratio, "times as large"), (1 / ratio if ratio else 0.0, "times smaller")):
        if value > 1.5 and abs(value - round(value)) < 1e-6 * value:
            return f", {round(value)} {text}"
    return ""


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f", factor {ratio:.6g}"


def _line(step: Step, parts: tuple[str, ...], *, ends: bool = False) -> str:
    """The line of the last event of a step that begins so, or ends so."""
    own = [
        event.where
        for event in step.events or ()
        if (event.what.endswith(parts) if ends else event.what.startswith(parts)) and event.where
    ]
    return own[-1] if own else ""


def precision(old: tuple[str, str], new: tuple[str, str]) -> Finding:
    """Another dtype."""
    return Finding(
        cause="precision_differs",
        summary=f"{new[0]} is in {new[1]}; in the baseline it is in {old[1]}",
        measured=f"{new[1]} against {old[1]}",
        shown_by="in float64 both loops make the same steps",
        culprits=(new[0],),
    )


def in_own(finding: Finding, dtype: str, came: Sequence[str], gone: Sequence[str]) -> Finding:
    """A difference that float64 does not show; ``came`` and ``gone`` are dtypes to which the loop casts now, and those
    to which it did."""
    cast = [f"the loop casts to {some(came)}, which it does not in the baseline"] if came else []
    cast += [f"the loop no longer casts to {some(gone)}"] if gone else []
    why = "" if cast else ": another order of operations loses digits, or a cast moved"
    return replace(
        finding,
        cause="precision_differs",
        summary="; ".join((*cast, f"in {dtype} {finding.summary}")),
        shown_by=f"in float64 both loops make the same steps, and the environment is that of the baseline{why}",
        repair="",
    )
