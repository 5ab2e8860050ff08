"""The findings in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.resume_equivalence.facts import is_moment, shown
from pytest_trainloop.finding import Finding
from pytest_trainloop.wording import be, count, some, they

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.checks.state.resume_equivalence.facts import Fact
    from pytest_trainloop.checks.state.resume_equivalence.runs import Uninterrupted

MOST = 12
"""Names that a finding gives at most."""


def finding_of(fact: Fact, a: Uninterrupted) -> Finding:
    """The finding of one fact."""
    measured = _measured(fact, a)
    return Finding(
        cause=fact.cause,
        level=fact.level,
        summary=_summary(fact),
        measured=measured,
        shown_by=_shown(fact),
        culprits=fact.names[:MOST],
        where=_where(fact, a),
        repair=_repair_of_keys(fact, a) if fact.cause == "weights_not_loaded" else _repair(fact),
    )


def _summary(fact: Fact) -> str:
    names, detail = some(fact.names), fact.detail
    what = fact.component or names
    loses = f"a resumed run loses {what}"
    texts = {
        "weights_not_loaded": (
            f"load does not restore {count(len(fact.names), 'weight')} ({names})"
            + (f": {they(fact.names)} {be(fact.names)} as the loop was built" if detail else "")
        ),
        "weights_overwritten": f"load restores {names} and then overwrites {'them' if len(fact.names) > 1 else 'it'}",
        "weights_rounded": f"a checkpoint rounds {count(len(fact.names), 'tensor')} ({names}) to {detail}",
        "optimizer_detached": f"after load the optimizer no longer trains {names}",
        "untied": f"after load {' and '.join(fact.names)} no longer share one weight",
        "optimizer_state_lost": f"{loses}: the moments begin anew",
        "optimizer_state_swapped": f"load gives weights the moments of others: {detail}",
        "scheduler_restarts": (
            f"after load the schedule goes on from another step: {names} ends at {detail}"
            if detail
            else f"after load the schedule goes on from another step ({_changed(fact) or names})"
        ),
        "rate_lost": f"a resumed run loses values of the optimizer's groups: {_changed(fact) or names}",
        "scaler_lost": f"after load the scale of the gradient scaler is {detail}" if detail else f"{loses}",
        "buffer_lost": f"a resumed run loses {names}" + (f", registered with {detail}" if detail[:4] == "pers" else ""),
        "counter_lost": (
            f"{loses}: {_changed(fact) or names}"
            if fact.level == "fault"
            else f"load restores {what} to another value: {_changed(fact) or names}"
        ),
        "state_lost": _state(fact),
        "average_lost": f"{loses}, which begins anew while the weights go on",
        "live_references": f"{fact.names[0]} is kept without a copy: it changes as training goes on",
        "rng_not_put_back": f"load does not restore the random state of {detail}, which the checkpoint holds",
        "rng_not_saved": f"training draws random numbers of {detail}, and the checkpoint has no random state",
        "own_generator": f"{loses}, a generator that training draws from",
        "drawn_from_seed": (
            f"{names} {be(fact.names)} neither in the checkpoint nor made by training: another seed gives others"
        ),
        "save_changes": f"save leaves {names} changed, and training goes on otherwise",
        "save_raises": f"save raises {fact.raised.summary if fact.raised else ''}",
        "load_raises": (
            fact.detail
            if fact.detail
            else f"load raises {fact.raised.summary}"
            if fact.raised and fact.names == ("load()",)
            else f"after load fit raises {fact.raised.summary if fact.raised else ''}, and it does not without stopping"
        ),
    }
    return texts[fact.cause]


def _state(fact: Fact) -> str:
    kind = fact.detail
    if kind == "gradient":
        return "a resumed run loses the gradients of a window that was under way"
    if kind == "mode":
        modes = ["training" if d.after else "evaluation" for d in fact.differences]
        return f"load leaves {some([n.removesuffix('.training') for n in fact.names])} in {modes[0]} mode"
    if kind == "stepped":
        what = count(len(fact.names), "tensor")
        return f"a resumed run loses {what} that an optimizer steps outside of the model ({some(fact.names)})"
    if kind == "requires_grad":
        return f"after load other weights train: {_changed(fact)}"
    return f"a resumed run loses {fact.component}"


def _changed(fact: Fact) -> str:
    """The first plain value that is another one, with its path."""
    for d in fact.differences:
        before, after = _number_in(d.before), _number_in(d.after)
        if isinstance(before, (bool, int, float, str)) or isinstance(after, (bool, int, float, str)):
            path = d.leaf.path
            if d.how != "changed" or path.endswith(("_step_count", "_last_lr[0]")):
                continue
            return f"{path} is {_plain(after)} in place of {_plain(before)}"
    return ""


def _number_in(value: Any) -> Any:
    """The entry of a tensor that has one; anything else as it is."""
    one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    return value.detach().item() if one else value


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _measured(fact: Fact, a: Uninterrupted) -> str:
    parts = []
    if fact.call is not None and fact.cause != "optimizer_detached":
        if fact.cause == "weights_not_loaded" and fact.call.elsewhere:
            parts.append(f"load_state_dict was called on another {fact.call.elsewhere}, which is not TrainLoop.model")
        for kind, keys in (("missing", fact.call.missing), ("unexpected", fact.call.unexpected)):
            if keys:
                parts.append(f"{count(len(keys), f'{kind} key')} ({some(keys)})")
    if fact.cause == "untied":
        parts.append(f"{count(len(fact.names), 'name')} of one tensor before saving, of more than one after load")
    elif fact.raised is not None:
        parts.append(f"{fact.raised.kind} {'after load' if fact.names == ('fit()',) else 'in ' + fact.names[0]}")
    elif fact.cause in ("average_lost", "buffer_lost") and fact.detail.startswith("evaluate"):
        parts.append(fact.detail)
    else:
        parts += _MEASURED[fact.cause](fact) if fact.cause in _MEASURED else []
    if fact.saved_as:
        parts.append(f"the checkpoint holds the values, as {fact.saved_as}")
    elif fact.differences and a.checkpoint.seen and _has_tensors(fact) and fact.cause != "save_changes":
        parts.append("the checkpoint does not hold the values")
    if fact.unequal == ("fit",):
        parts.append("fit raises in the resumed run")
    elif fact.unequal:
        ended, steps = count(len(fact.unequal), "tensor"), count(a.ended.made.steps[-1], "step")
        parts.append(f"{ended} {be(fact.unequal)} different after {steps} ({some(fact.unequal)})")
    return "; ".join(parts) or f"{count(len(fact.names), 'value')} differ after load"


_MEASURED: dict[str, Callable[[Fact], list[str]]] = {
    "weights_rounded": lambda fact: [f"{count(len(fact.names), 'tensor')} before save() and after load()"],
    "optimizer_detached": lambda fact: [f"it steps {fact.detail} that are not in the model"],
    "scheduler_restarts": lambda fact: [f"{fact.names[0]} ends at {fact.detail}"] if fact.detail else [],
    "scaler_lost": lambda fact: [f"scale {fact.detail}"] if fact.detail else [],
    "live_references": lambda fact: [f"{fact.detail} of the checkpoint is no longer what it was when it was saved"],
    "rng_not_put_back": lambda fact: [f"state of {fact.detail} after load, against the state in the checkpoint"],
    "rng_not_saved": lambda fact: [f"the state of {fact.detail} before and after the second half of training"],
    "drawn_from_seed": lambda fact: [f"{count(len(fact.names), 'tensor')} of the model after load, under two seeds"],
    "save_changes": lambda fact: [f"{count(len(fact.names), 'value')} before and after save()"],
}


def _has_tensors(fact: Fact) -> bool:
    return any(isinstance(d.before, torch.Tensor) and d.before.numel() > 1 for d in fact.differences)


def _shown(fact: Fact) -> str:
    if fact.unequal:
        return f"with everything carried over the runs end alike, and with everything but {fact.component} they do not"
    if fact.cause in ("average_lost", "buffer_lost") and fact.level == "fault":
        return f"evaluate() was called after load, once with {fact.component} carried over and once without"
    if fact.cause == "average_lost" and fact.detail:
        return (
            "it moves as training goes on, and has the shapes of weights; an evaluate= that returns a loss shows who "
            "reads it, while an accuracy is often equal"
        )
    return _SHOWN.get(fact.cause, "compared after load with what it was when it was saved")


_SHOWN = {
    "average_lost": "it moves as training goes on, and has the shapes of weights; evaluate= would show who reads it",
    "weights_rounded": "what load gives equals what was saved, cast down and up again",
    "optimizer_detached": "the tensors of the optimizer that steps are looked up among the weights of the model",
    "untied": "the tensors behind the names are the same object before saving and not after load",
    "scheduler_restarts": "training moves the count, and the resumed run ends at another one",
    "scaler_lost": "the scale was halved before saving, so that one that never changes is seen too",
    "live_references": "it shares its memory with a weight of the model that trains on",
    "rng_not_put_back": "the generators stood elsewhere before load, and training draws from them",
    "drawn_from_seed": "a loop built under another seed keeps its own after load",
    "save_changes": "a run without save() ends elsewhere, and one in which they are put back after it ends like that",
    "save_raises": "save was called after three steps of training",
    "load_raises": "load was called on a fresh loop with a copy of what save gave",
}


def _where(fact: Fact, a: Uninterrupted) -> str:
    if fact.raised is not None:
        return str(fact.raised.place) if fact.raised.place.file else ""
    if fact.call is not None and fact.call.where:
        return fact.call.where
    own = ("save_changes", "live_references", "rng_not_saved", "weights_rounded")
    return a.lines["save"] if fact.cause in own else a.lines["load"]


def _repair(fact: Fact) -> str:
    """What the loop's own names make of the cause's repair; empty for that one."""
    name = fact.component
    if fact.cause == "rng_not_put_back":
        return f"at the end of load call {' and '.join(fact.names)} with what the checkpoint holds: {fact.saved_as}"
    if fact.cause == "live_references":
        last = fact.names[0].split("[")[0].rpartition(".")[2]
        return (
            f"copy where it is kept, {last} = copy.deepcopy(model.state_dict()): state_dict() returns the live "
            "tensors, and a copy in save() comes too late"
        )
    if fact.cause == "optimizer_state_lost" and name.startswith("optimizer["):
        which = name.partition(".")[0]
        return f"save and load the state_dict() of {which} as well, after it is built"
    if fact.cause == "buffer_lost" and fact.detail != "persistent=False":
        return f"save {some(fact.names)} and set it in load (what a module's state_dict() has comes back by itself)"
    if fact.cause == "counter_lost":
        return f"save {name} and set it in load"
    if fact.cause == "state_lost" and fact.detail in ("tensor", "array", "length"):
        own = (
            f"register_buffer({name.rpartition('.')[2]!r}, ...) where it belongs to a module; else "
            if "." in name
            else ""
        )
        return f"{own}save {name} and set it in load"
    if fact.cause == "state_lost" and fact.detail == "stepped":
        return "save these tensors (master weights, a temperature) beside the model, and copy_() them back in load"
    if fact.cause == "state_lost" and fact.detail == "mode":
        return "call model.train() at the start of fit, or leave the mode alone in load"
    if fact.cause == "state_lost" and fact.detail == "requires_grad":
        return "set requires_grad in load as it was, from the step or phase that the checkpoint holds"
    if fact.cause == "state_lost" and fact.detail == "gradient":
        return "save at the end of a window, after optimizer.step()"
    if fact.cause == "average_lost":
        return f"save and restore {name.removeprefix('weights of ')} as well"
    return ""


def _repair_of_keys(fact: Fact, a: Uninterrupted) -> str:
    call = fact.call
    if call is not None and call.elsewhere:
        return f"call load_state_dict on the {call.elsewhere} that trains, and give that one as TrainLoop.model"
    if call is None:
        return 'model.load_state_dict(state["model"]) in load, and model.state_dict() in what save gives'
    renamed = _renamed(fact, a)
    state = next((entry for _, _, entry in renamed if "(" not in entry), "state")
    for missing in call.missing:
        for key in call.unexpected:
            if key.endswith(f".{missing}"):
                prefix = key[: -len(missing)]
                return (
                    f"load_state_dict({{k.removeprefix({prefix!r}): v for k, v in {state}.items()}}) with strict=True, "
                    "which raises where keys do not match"
                )
            if missing.endswith(f".{key}"):
                prefix = missing[: -len(key)]
                return f"load_state_dict({{{prefix!r} + k: v for k, v in {state}.items()}}) with strict=True"
    if renamed:
        name, key, _ = renamed[0]
        more = f" (and {len(renamed) - 1} more)" if len(renamed) > 1 else ""
        return (
            f"the checkpoint has {name} as {key}{more}: use one name in save and in load, and load with strict=True, "
            "which raises where keys do not match"
        )
    if call.missing and not fact.saved_as:
        return (
            f"put {some(fact.names)} into the checkpoint as well, and load with strict=True where nothing is left out"
        )
    return ""


def _renamed(fact: Fact, a: Uninterrupted) -> list[tuple[str, str, str]]:
    """Weights that the checkpoint holds under a key that the model does not have: name, key, and the mapping in it."""
    keys = fact.call.unexpected if fact.call is not None else ()
    tensors = [(d.leaf.path, d.before) for d in fact.differences if is_moment(d.before)]
    held = [(shown(path, a), a.checkpoint.holds(value)) for path, value in tensors]
    return [
        (name, key, entry.removesuffix(f"[{key!r}]"))
        for name, entry in held
        for key in keys
        if entry.endswith(f"[{key!r}]")
    ]
