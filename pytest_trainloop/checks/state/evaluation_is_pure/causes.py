"""The causes of ``evaluation_is_pure``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

CHANGED = "{first} was {was} before {evaluation} and is {now} after it"
RAISES = "fit then raises {raised}"
ENDS = (
    "after {rounds:further optimizer step} {weight} differs by {gap:share} of its largest entry from the run without "
    "{evaluation}"
)
"""What ``measured`` says: of what evaluation left, and of what training made of it."""

ENDS_INSIDE = (
    "after {rounds:optimizer step} {weight} differs by {gap:share} of its largest entry from a run in which all that "
    "{evaluation} changes is restored"
)

KEEP_THE_LOADER = "keep the loader, not its iterator: for batch in loader: inside evaluate()"

_SEEDED_INSIDE = "{evaluations} evaluations inside fit found {which} in different states and left it in the same state"

_seen = partial(Cause, change=("seen",))
_left = partial(
    _seen,
    measured="{measured}",
    shown_by="with {evaluation} {when} training {raised:?raises, and without it it does not|ends differently than "
    "without it}; with {component} restored after {evaluation} it ends as without it",
)
_harmful = partial(_left, explains=("overfit_one_batch", "determinism"))

CAUSES = {
    "evaluation_trains": _harmful(
        proof="an optimizer steps inside evaluate(), and with the weights restored after it training is as without it",
        summary="evaluate() makes {steps:optimizer step} that change {what}, and training continues from there",
        repair="adapt a copy: adapted = copy.deepcopy(model), and an optimizer over adapted.parameters(); or leave the "
        "step out of evaluation",
        change=("stepped", "seen"),
        source="https://github.com/SKrisanski/FSCT/issues/12",
    ),
    "weights_left": _harmful(
        proof="evaluate() writes weights, and with them restored after it training is as without it",
        summary="{evaluation} leaves {holder:?the values of {holder}|other values} in {what}, and training continues "
        "with them",
        repair="put the training weights back in a finally:, from copies: kept = copy.deepcopy(model.state_dict()) "
        "before other weights are loaded, model.load_state_dict(kept) at the end",
        do_not="keep model.state_dict() as it is: it holds the live tensors, and is overwritten with them",
        source="https://github.com/aqlaboratory/openfold/pull/90",
        change=("cast in place", "end of evaluation", "seen"),
    ),
    "gradients_left": _harmful(
        proof="training is as without evaluate() once .grad is restored after it",
        summary="evaluate() leaves gradients in {what}, and the next optimizer step uses them",
        repair="put with torch.no_grad(): around evaluation; where a gradient is needed (attacks, saliency), use "
        "torch.autograd.grad(loss, x), which writes no .grad",
        do_not="call model.zero_grad() at the end: it deletes the gradients of an unfinished accumulation window",
        variants={
            "attack": {
                "repair": "use torch.autograd.grad(loss, x) instead of backward() where evaluation needs a gradient of "
                "x: it writes no .grad; else remove backward(), and put with torch.no_grad(): around evaluation"
            },
        },
        source="https://github.com/harvardnlp/annotated-transformer/issues/14",
    ),
    "window_cleared": _harmful(
        proof="an evaluation inside fit clears gradients that wait for their step; with them put back training differs",
        summary="{evaluation} clears gradients in the middle of an accumulation window: the next optimizer step misses "
        "{backwards:backward pass}",
        repair="leave zero_grad() out of the evaluation: under no_grad() it writes no .grad, and the training loop "
        "clears the gradients after its step",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/18713",
    ),
    "buffers_moved_by_evaluation": _harmful(
        proof="training is as without evaluate() once the buffer is restored after it",
        summary="{evaluation} changes {what}, which training computes with",
        repair="if self.training: around the line that updates it; or evaluate copy.deepcopy(model)",
        source="https://github.com/strands-labs/robots/pull/2426",
    ),
    "mode_left": _harmful(
        proof="training is as without evaluate() once the modules' modes are restored after it",
        summary="evaluate() leaves {what} {now}, and training continues in it",
        repair="was = model.training before model.eval(), and model.train(was) in a finally: at the end",
        variants={
            "frozen parts": {
                "repair": "train() switches the whole model: call eval() on the parts that are frozen after it, or "
                "override train() in the model so that they stay in evaluation mode"
            },
        },
        source="https://github.com/wkentaro/pytorch-fcn/issues/57",
        change=("end of evaluation", "seen"),
    ),
    "state_left": _harmful(
        proof="training is as without evaluate() once this is restored after it",
        summary="{evaluation} changes {what}, and training continues with that",
        repair="if self.training: around the line that changes it; or put it back at the end of evaluation",
        variants={
            "kept": {
                "summary": "{evaluation} stores {what}, computed without gradients, and training uses it: {stopped} "
                "{several:?are|is} no longer trained",
                "repair": "use the stored value only where gradients are off, and compute it again in training: if "
                "self.training: compute it; or clear it in train()",
            },
            "gathered": {
                "summary": "a second evaluate() returns {now} instead of {was}: {what} still holds the values of the "
                "first one",
                "measured": "the first evaluate() of a model returns {was}; after one that returned {before} it is "
                "{now}{how:?, their {how}|}",
                "shown_by": "with {what} restored after the first evaluate() the second one returns {was} too",
                "repair": "empty it at the start of evaluate(): {resets:?{what}.reset()|total = 0, values = []}; or "
                "make it there",
            },
            "used up": {
                "summary": "only the first evaluate() has data: {what} is exhausted after it, and a second call "
                "{raised:?raises {raised}|calls no module}",
                "measured": "{forwards:forward pass} in the first evaluate(), none in the second",
                "shown_by": "the next item of {what} was asked for after the second call, and there is none",
                "repair": KEEP_THE_LOADER,
            },
            "used up by two": {
                "summary": "a second evaluate() has less data than the first one: {what} is exhausted in it",
                "measured": "{forwards:forward pass} in the first evaluate(), {left} in the second",
                "shown_by": "the next item of {what} was asked for after the second call, and there is none",
                "repair": KEEP_THE_LOADER,
            },
        },
        source="https://github.com/NVIDIA/Megatron-LM/pull/411",
        change=("written in forward", "end of evaluation", "seen"),
    ),
    "switch_left": _harmful(
        proof="training is as without evaluate() once this switch of the process is restored after it",
        summary="evaluate() leaves {what} at {now}, and training continues under it",
        repair="set it for a block: with torch.no_grad(): in place of torch.set_grad_enabled(False), which stays on; "
        "or put it back in a finally:",
        variants={
            "inference mode": {
                "shown_by": "it is on after evaluate(), was off before it, and without evaluate() training is another"
            },
        },
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/2180",
    ),
    "data_changed": _harmful(
        proof="training is as without evaluate() once the data is restored after it",
        summary="evaluate() changes {what} in place, which training is given",
        repair="compute a new tensor, x = (x - mean) / std, or clone() before operations in place (sub_, /=)",
        source="https://github.com/pytorch/vision/issues/680",
    ),
    "inference_tensor_kept": _harmful(
        proof="training raises after evaluate() and not without it, and a tensor that it kept is an inference tensor",
        summary="evaluate() keeps {names}, made in inference mode, and training raises on it",
        measured=RAISES,
        shown_by="without evaluate() the same steps raise nothing",
        repair="torch.no_grad() in place of torch.inference_mode(); or make what is kept (a cache, a table of "
        "positions) in __init__",
        source="https://github.com/huggingface/diffusers/issues/1658",
    ),
    "reseeds": _seen(
        proof="two random states before evaluate() give one after it, and training differs between them without it",
        summary="evaluation seeds {which} with {constant:?a constant|a number of its own}, and training continues from "
        "there",
        measured="two states of {which} before evaluate() give one and the same state after it",
        shown_by="without evaluate() training differs between the two states ({parts}); with it training is equal, and "
        "evaluate() after another step gives that state too",
        repair="generator = torch.Generator().manual_seed(0) for what evaluation draws; or with "
        "torch.random.fork_rng(): around it",
        explains=("overfit_one_batch", "determinism"),
        variants={
            "another seed each time": {
                "shown_by": "another step gives another state: the seed follows the step or the epoch"
            },
            "nothing draws": {
                "shown_by": "training draws no random numbers here, or seeds itself: nothing depends on it yet"
            },
            "another generator": {
                "shown_by": "training still differs between the two: it draws from another generator as well"
            },
            "inside": {
                "measured": _SEEDED_INSIDE,
                "shown_by": "training draws from it: the forward pass after each of {evaluations} evaluations starts "
                "from one state, other forward passes from other states",
            },
            "inside, not shown": {
                "measured": _SEEDED_INSIDE,
                "shown_by": "no step without an evaluation before it was seen, or no seed before its forward passes; "
                "training may seed too",
            },
            "inside, nothing draws": {
                "measured": _SEEDED_INSIDE,
                "shown_by": "training draws nothing from it: nothing depends on it yet",
            },
        },
        source="https://github.com/huggingface/diffusers/issues/175",
    ),
    "dropout_stays_on": _seen(
        proof="dropout acts inside a module whose training is False",
        summary="{dropout}, in evaluate()",
        measured="{measured}",
        repair="F.dropout(x, p, training=self.training)",
        settle="training= written in the call says that dropout is wanted there",
        source="https://github.com/karpathy/nanoGPT/pull/240",
    ),
    "evaluation_raised": _seen(
        proof="evaluate() raises after optimizer steps of fit, which ran through",
        summary="evaluate raised {raised}",
        measured="after {steps:optimizer step}, which raised nothing",
        repair="fix the line that raised: evaluate() must give it every argument that training gives it (a step, an "
        "epoch)",
        variants={
            "again": {
                "summary": "evaluate raised {raised} when it was called again",
                "measured": "one evaluate() before the first step raised nothing, and one after {steps:step} does",
                "repair": "let evaluate() make what it uses up or closes, if the project evaluates more than once",
            }
        },
        source="https://github.com/facebookresearch/fairchem/pull/261",
    ),
    "norm_statistics_moved": _seen(
        proof="running statistics of norms differ after evaluate(), and training does not depend on them",
        summary="evaluate() changes {what}, on which training does not depend",
        measured="{moved} running statistics differ after evaluate()",
        shown_by="they differ right after evaluate(), and the weights that train end as without it",
        repair="model.eval() before evaluation, unless they are estimated again on purpose (precise batch norm)",
        source="https://github.com/princeton-vl/pytorch_stacked_hourglass/issues/44",
    ),
    "hooks_left": _seen(
        proof="a module has more hooks after each call of evaluate()",
        summary="evaluate() leaves one more hook on {names} each time",
        measured="{hooks}: {was} before evaluate(), {now} after it, {twice} after the second call",
        shown_by="the number grows with each call",
        repair="keep the handle, handle = module.register_forward_hook(...), and handle.remove() in a finally:",
        source="https://github.com/KamitaniLab/bdpy/issues/72",
        change=("end of evaluation", "seen"),
    ),
    "feedback": _left(
        proof="evaluation sets what only it sets (a rate, a threshold, a difficulty), and training is another by it",
        summary="evaluate() changes {what}, and training continues with that",
        repair="set it in the training loop, with the score that evaluation returns",
        source="https://github.com/facebookresearch/fairchem/pull/234",
    ),
    "matters_inside_fit": _left(
        proof="between two steps of one fit it changes training, between two calls of fit it does not",
        summary="evaluate() leaves {what} {mode:?{now}|changed}, which matters where it is called between two steps of "
        "fit",
        repair="restore at the end of evaluation what it changes: was = model.training ... model.train(was)",
        change=("end of evaluation", "seen"),
        source="https://github.com/open-mmlab/mmaction2/issues/1781",
    ),
    "raises_before_first_step": _seen(
        proof="evaluate() raises on a fresh loop and not after optimizer steps",
        summary="evaluate raised {raised}, before the first optimizer step",
        measured="on a fresh loop",
        repair="if the project evaluates before it trains, create what evaluate() reads where the loop is built",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/7050",
    ),
}

found = finding_maker(CAUSES)
