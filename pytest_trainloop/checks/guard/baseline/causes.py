"""The causes of ``baseline``, and what is said of each. Plain data, no torch.

If the steps differ, the stage of the first difference decides text, repair and line. If the setup differs, the kind of
fact does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.registry import Cause, finding_maker

if TYPE_CHECKING:
    from pytest_trainloop.core.registry import Part

COMMAND = "pytest --trainloop --trainloop-only=baseline --trainloop-update TEST"
"""What accepts the difference; ``TEST`` is replaced by the node id."""

ACCEPT = f"accept an intended change: {COMMAND}"

_NUMBERS = "relative difference {gap:.2g} in {precision}, bound {bound:.1g}"
_GRADIENTS_OF = "the gradients of step {step} are those of the baseline"

LINES: dict[str, tuple[Part, ...]] = {
    "data": ("data", "loader"),
    "rows": ("loader",),
    "loss": ("loss", "seen"),
    "lr": ("scheduler", "optimizer"),
    "update": ("step", "optimizer"),
    "buffer": ("module",),
    "start": ("drawn", "module"),
    "parameters": ("module",),
    "left out": ("group",),
    "group": ("group",),
    "optimizer": ("optimizer",),
    "frozen": ("freeze", "module"),
    "scheduler": ("scheduler",),
    "calls": ("seen",),
    "clip": ("seen",),
    "some gradients": ("use",),
    "precision": ("cast",),
}
"""The line to change, by stage or kind of fact: the first of these that is known."""

CAUSES = {
    "steps_differ": Cause(
        proof="the setup is that of the baseline, and batch, module output, loss, gradient, learning rate, update or "
        "buffer is the first that differs",
        repair=f"undo what changed there; or {ACCEPT}",
        variants={
            "data": {
                "summary": "{names} has {text} at step {step}{rows:?; {rows}|}",
                "measured": "{gap:?relative difference {gap:.2g}|{text}}",
                "shown_by": "the batch differs before the model reads it{earlier:?; the batches of the {earlier:step} "
                "before are equal|}",
                "repair": f"give the loop the batches of the baseline; or {ACCEPT}",
            },
            "output": {
                "summary": "{headline} at step {step}{other}",
                "measured": "|output| {new:.4g}, {old:.4g} in the baseline; " + _NUMBERS,
                "shown_by": "{shown}",
            },
            "called again": {
                "summary": "{what} is called {now} at step {step}; in the baseline {then}: {why}",
                "measured": "{calls:call} of {path}, {before} in the baseline; " + _NUMBERS,
                "shown_by": "{path} is the first module whose outputs differ, all calls of the step together",
                "repair": f"call the model as often as the baseline does, or compare without dropout; or {ACCEPT}",
            },
            "loss": {
                "summary": "the loss{called:? ({called})|} of step {step} is {new:.6g}; in the baseline {old:.6g}"
                "{factor}{silent:?; {silent} {silent:are} no longer called|}",
                "measured": "{new:.6g} against {old:.6g}{ratio}; "
                + _NUMBERS
                + "{again:?; {passes:backward pass}, {before} in the baseline|}",
                "shown_by": "batch and outputs of all {silent:?called |}modules are those of the baseline{functions}",
                "repair": f"compute the loss as in the baseline; or {ACCEPT}",
            },
            "gradient": {
                "summary": "{clip:?{clip}: |}{text}",
                "measured": "|gradient| {new:.4g}, {old:.4g} in the baseline{ratio}; " + _NUMBERS,
                "shown_by": "batch, outputs of all modules and loss of step {step} are those of the baseline; {rest}",
                "repair": "check for detach(), no_grad() or a scaled gradient between the loss and these; or " + ACCEPT,
            },
            "lr": {
                "summary": "the learning rate of step {step} is {new:.6g}; in the baseline {old:.6g}",
                "measured": "{new:.6g} against {old:.6g} for {parameters:parameter}{ratio}",
                "shown_by": _GRADIENTS_OF + ", and so is everything before it",
                "repair": f"set the learning rate of the baseline; or {ACCEPT}",
            },
            "update": {
                "summary": "step {step} changes {names} differently than in the baseline",
                "measured": "{sizes}" + _NUMBERS,
                "shown_by": _GRADIENTS_OF + ", and so are learning rate, class and options of the optimizer",
                "repair": f"compute the update as in the baseline; or {ACCEPT}",
            },
            "buffer": {
                "summary": "{why:?{why}: |}{names} {several:?have other values|has another value} after step {step}",
                "measured": "|{first}| {new:.4g}, {old:.4g} in the baseline; " + _NUMBERS,
                "shown_by": "gradients and updates of step {step} are those of the baseline",
                "repair": f"keep momentum and mode of the module that holds it; or {ACCEPT}",
            },
        },
        source="https://github.com/world-modelz/dreamax/issues/20",
    ),
    "setup_differs": Cause(
        proof="a parameter, an optimizer option, a scheduler or a call between two steps is not that of the baseline, "
        "and explains the first difference",
        summary="{summary}",
        measured="{measured}",
        shown_by="{shown}",
        repair=f"set it up as in the baseline; or {ACCEPT}",
        variants={
            "parameters": {"repair": f"keep the parameters of the baseline; or {ACCEPT}"},
            "frozen": {"repair": f"requires_grad_() as in the baseline; or {ACCEPT}"},
            "left out": {"repair": f"give them to the optimizer again; or {ACCEPT}"},
            "group": {"repair": f"use the option of the baseline; or {ACCEPT}"},
            "optimizer": {"repair": f"use the class of the baseline; or {ACCEPT}"},
            "scheduler": {"repair": f"build the scheduler of the baseline, and step it; or {ACCEPT}"},
            "calls": {"repair": f"call it where the baseline does; or {ACCEPT}"},
            "rows": {"repair": f"give the loop the batches of the baseline; or {ACCEPT}"},
        },
        source="https://github.com/undark-lab/swyft/issues/16",
    ),
    "initial_weights_differ": Cause(
        proof="the weights differ before the first step",
        summary="{names} {names:begin} with another distribution than in the baseline",
        measured="{text}",
        shown_by="mean and standard deviation differ more than two draws of one distribution do; {rest}",
        repair=f"initialise them as in the baseline; or {ACCEPT}",
        variants={
            "other draws": {
                "summary": "{names} {names:begin} with other random numbers than in the baseline",
                "measured": "{tensors:tensor}, mean and standard deviation as in the baseline",
                "shown_by": "{first} is the first tensor that differs, in the order of construction: before it one "
                "more or one fewer random number is drawn, or modules are built in another order",
                "repair": "build modules in the order of the baseline, or load the weights that it began with; the "
                f"steps cannot be compared from other weights; or {ACCEPT}",
            }
        },
        source="https://github.com/NNPDF/nnpdf/pull/1734",
    ),
    "precision_differs": Cause(
        proof="in float64 the loops make the same steps, and in their own precision they do not",
        summary="{names} is in {now}; in the baseline it is in {then}",
        measured="{now} against {then}",
        shown_by="in float64 both loops make the same steps",
        repair=f"use the dtype of the baseline; or {ACCEPT}",
        source="https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
        change=("seen",),
    ),
    "renamed": Cause(
        proof="the tensors begin with the same values",
        summary="the same tensors have other names: {texts}",
        measured="{tensors:tensor} under another name or in other pieces",
        shown_by="they begin with the same values",
        repair=f"{COMMAND} writes the new names into the baseline",
    ),
}

found = finding_maker(CAUSES)
