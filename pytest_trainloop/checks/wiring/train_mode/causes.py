"""The causes of ``train_mode``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.core.registry import Cause, finding_maker

_WHAT = "{whole:?the whole model is|module{several:?s|} {modules} {modules:are}} trained in evaluation mode"
_ACTIVE = "runs in training mode, with module{several:?s|} {modules} active"
_MEASURED = "modules that depend on the mode: {count}{known:?; in training mode the loss changes by {differs:.1e}|}"

CAUSES = {
    "trained_in_eval": Cause(
        proof="training forward passes run in evaluation mode from the start, and in training mode the loss differs",
        summary=f"{_WHAT} from the first step on",
        measured=_MEASURED,
        shown_by="no call of train() reaches them before the training forward pass",
        repair="call model.train() before the training loop (from_pretrained returns models in evaluation mode)",
        variants={
            "switched": {
                "shown_by": (
                    "this call switches them, and nothing switches them back before the training forward pass"
                ),
                "repair": "remove this eval(), or call train() after it",
            }
        },
        explains=("overfit_one_batch",),
        change=("seen",),
        source="https://github.com/autogluon/autogluon/issues/4965",
    ),
    "eval_left_on": Cause(
        proof="modules that trained in training mode run in evaluation mode after an evaluation",
        summary=f"{_WHAT} from optimizer step {{step}} on: an evaluation called eval() and nothing called train()",
        measured=_MEASURED,
        shown_by="they ran in training mode before, an evaluation switched them, and nothing switched them back",
        repair="model.train() after the evaluation that begins here, on the module that eval() was called on",
        variants={
            "called twice": {
                "shown_by": (
                    "fit was called twice, as its loop would go on: an evaluation at the end of the first call "
                    "switched them, and nothing switched them back"
                )
            }
        },
        explains=("overfit_one_batch",),
        change=("seen",),
        source="https://github.com/fartashf/vsepp/issues/4",
    ),
    "evaluated_in_train": Cause(
        proof="an evaluation runs in training mode with modules that act differently there",
        summary=f"an evaluation inside fit {_ACTIVE}",
        measured="{calls:forward pass} in training mode without a backward pass, next to {steps:step}",
        shown_by=(
            "a metric is computed from their outputs, and with other outputs the loop backpropagates the same loss"
        ),
        repair="model.eval() before the evaluation, model.train() after it",
        variants={
            "declared": {
                "summary": f"evaluate {_ACTIVE}",
                "measured": "modules that depend on the mode, in training mode during evaluate(): {count}",
                "shown_by": "seen in the forward pass itself, after a short run of fit",
            }
        },
        explains=("overfit_one_batch",),
        change=("without gradients", "seen"),
        judged="evaluate= has the project's evaluation judged, as a promise",
        source="https://github.com/ipolharvard/ethos-ares/issues/20",
    ),
    "dropout_stays_on": Cause(
        proof="dropout drops entries in a forward pass that trains nothing, in a module whose training is False",
        summary="{what}, in an evaluation inside fit",
        measured="{measured}",
        repair="F.dropout(x, p, training=self.training)",
        explains=("evaluation_is_pure:dropout_stays_on",),
        change=("seen",),
        source="https://github.com/rixwew/pytorch-fm/issues/21",
    ),
}
found = finding_maker(CAUSES)
