"""Evaluation leaves training as it was: with it and without it the same weights come out.

What it does
    It runs ``fit`` twice on one loop, three optimizer steps each, once with ``evaluate()`` between the two calls and
    once without, and compares the weights at the end. A third run calls ``evaluate()`` before the first step. Where no
    ``evaluate`` is declared it looks at what evaluations inside ``fit`` do to the random generators.

Why is this bad?
    A validation that leaves averaged weights in the model, gradients in ``.grad``, batch norms in evaluation mode,
    gradients switched off or a constant seed behind changes all training after it, and nothing raises. How often one
    validates then decides what is learned.

How it decides
    Evaluation may change much that training does not use: histories, best weights, caches, a calibrated temperature,
    generators that are drawn from. So it is not asked what changed, but whether training comes out differently. Both
    runs have the same batches, and the generators are seeded alike after the cut. Compared are the weights that the
    second call of ``fit`` moves without evaluation, up to rounding; bit for bit where a weight comes back rounded to a
    lower precision.
    Where they differ, everything that differs right after ``evaluate()`` is put back: weights, gradients, buffers,
    modes, attributes, optimizer state, data, the process's switches. If training then is as it was without evaluation,
    all but one of them is put back, one after another: what makes training differ alone is the cause. If nothing that
    could be put back restores it, the check is skipped.
    *Reseeding*: where ``evaluate()`` leaves a global generator in the same state whatever it was before, runs with two
    random states at the cut are compared. A fault where they train differently without evaluation and alike with it.
    A seed of its own each time is advice; evaluation that merely draws is nothing.
    *Dropout* that acts in evaluation mode is a fault where its call leaves ``training=`` to the default or has no such
    argument, advice where it is written out or the same inputs come several times (samples).
    *Feedback*: what ``fit`` itself never changes, and what evaluation sets by the model's score or moves on each time
    (a rate on a plateau, a curriculum, weights of classes), steers training on purpose: advice.
    *Inside fit*: where evaluation changes mode, gradients or switches, and ``fit`` sets them anew as it begins, it is
    also called between two steps of one ``fit``. What differs there alone is advice, but not a mode that ``fit`` sets
    again later, at the start of an epoch.

Faulty
    >>> def evaluate():
    ...     model.eval()
    ...     with torch.no_grad():
    ...         return model(torch.ones(4, 8)).mean().item()

Fixed
    >>> def evaluate():
    ...     was = model.training
    ...     model.eval()
    ...     try:
    ...         with torch.no_grad():
    ...             return model(torch.ones(4, 8)).mean().item()
    ...     finally:
    ...         model.train(was)

Known limits
    What ``evaluate`` returns is not compared. An evaluation that acts in its second call only (restoring best weights)
    is not seen. Streams that evaluation and training share cannot be put back: a skip. A ``fit`` that trains in its
    first call only is judged between two of its steps. An evaluation inside ``fit`` cannot be taken out, so only
    dropout and reseeding are looked at there.
    Optimizer steps of the loop itself: 15 where nothing is found, 6 of them shared with ``resume_equivalence``; 12 more
    where evaluation casts weights or sets switches, where it leaves gradients or modes, or where an evaluation is seen
    inside ``fit``; where something is found 6 to put all back, 6 for each thing that differs and 3 for its line: 21 to
    50, in trainers of libraries up to 100.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.state_dict
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import count, share, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.evaluation_is_pure.interposed import Raised
    from pytest_trainloop.checks.state.evaluation_is_pure.left import Left
    from pytest_trainloop.checks.state.evaluation_is_pure.reseeding import Reseeding
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.dropout_in_evaluation import ActiveDropout

MOST_CULPRITS = 6
"""Attributes that a finding names; its summary says how many there are."""

_LEARNING = ("overfit_one_batch", "determinism")

CAUSES = {
    "evaluation_trains": Cause(
        proof="an optimizer steps inside evaluate(), and with the weights put back after it training is as without it",
        repair=(
            "adapt a copy: adapted = copy.deepcopy(model), and an optimizer over adapted.parameters(); or leave the "
            "step out of evaluation"
        ),
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/SKrisanski/FSCT/issues/12",
    ),
    "weights_left": Cause(
        proof="evaluate() writes weights, and with them put back after it training is as without it",
        repair=(
            "put the training weights back in a finally:, from copies: kept = copy.deepcopy(model.state_dict()) before "
            "other weights are loaded, model.load_state_dict(kept) at the end"
        ),
        do_not="keep model.state_dict() as it is: it holds the live tensors, and is overwritten with them",
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/aqlaboratory/openfold/pull/90",
    ),
    "gradients_left": Cause(
        proof="with .grad put back after evaluate() training is as without it",
        repair=(
            "with torch.no_grad(): around evaluation; where a gradient is needed (attacks, saliency) "
            "torch.autograd.grad(loss, x), which writes no .grad"
        ),
        do_not="call model.zero_grad() at the end: it loses what an unfinished window has gathered",
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/harvardnlp/annotated-transformer/issues/14",
    ),
    "buffers_moved_by_evaluation": Cause(
        proof="with the buffer put back after evaluate() training is as without it",
        repair="if self.training: around the line that updates it; or evaluate copy.deepcopy(model)",
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/strands-labs/robots/pull/2426",
    ),
    "mode_left": Cause(
        proof="with the modules' modes put back after evaluate() training is as without it",
        repair="was = model.training before model.eval(), and model.train(was) in a finally: at the end",
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/wkentaro/pytorch-fcn/issues/57",
    ),
    "state_left": Cause(
        proof="with this put back after evaluate() training is as without it",
        repair="if self.training: around the line that changes it; or put it back at the end of evaluation",
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/NVIDIA/Megatron-LM/pull/411",
    ),
    "switch_left": Cause(
        proof="with this switch of the process put back after evaluate() training is as without it",
        repair=(
            "set it for a block: with torch.no_grad(): in place of torch.set_grad_enabled(False), which stays on; or "
            "put it back in a finally:"
        ),
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/2180",
    ),
    "data_changed": Cause(
        proof="with the data put back after evaluate() training is as without it",
        repair="compute a new tensor, x = (x - mean) / std, or clone() before operations in place (sub_, /=)",
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/pytorch/vision/issues/680",
    ),
    "inference_tensor_kept": Cause(
        proof="training raises after evaluate() and not without it, and a tensor that it kept is an inference tensor",
        repair=(
            "torch.no_grad() in place of torch.inference_mode(); or make what is kept (a cache, a table of positions) "
            "in __init__"
        ),
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/huggingface/diffusers/issues/1658",
    ),
    "reseeds": Cause(
        proof="two random states before evaluate() give one after it, and training differs between them without it",
        repair=(
            "generator = torch.Generator().manual_seed(0) for what evaluation draws; or with "
            "torch.random.fork_rng(): around it"
        ),
        explains=_LEARNING,
        change=("seen",),
        source="https://github.com/huggingface/diffusers/issues/175",
    ),
    "dropout_stays_on": Cause(
        proof="dropout acts inside a module whose training is False",
        repair="F.dropout(x, p, training=self.training)",
        change=("seen",),
        settle="training= written in the call says that dropout is meant there",
        source="https://github.com/karpathy/nanoGPT/pull/240",
    ),
    "evaluation_raised": Cause(
        proof="evaluate() raises after optimizer steps of fit, which ran through",
        repair=(
            "mend the line that raised; what training passes on to it (a step, an epoch) is not there in evaluation "
            "unless evaluate passes it too"
        ),
        change=("seen",),
        source="https://github.com/facebookresearch/fairchem/pull/261",
    ),
    "norm_statistics_moved": Cause(
        proof="running statistics of norms differ after evaluate(), and training does not depend on them",
        repair="model.eval() before evaluation, unless they are estimated anew on purpose (precise batch norm)",
        change=("seen",),
        source="https://github.com/princeton-vl/pytorch_stacked_hourglass/issues/44",
    ),
    "hooks_left": Cause(
        proof="a module has more hooks after each call of evaluate()",
        repair="keep the handle, handle = module.register_forward_hook(...), and handle.remove() in a finally:",
        change=("seen",),
        source="https://github.com/KamitaniLab/bdpy/issues/72",
    ),
    "feedback": Cause(
        proof="evaluation sets what only it sets (a rate, a threshold, a difficulty), and training is another by it",
        repair="set it in the training loop, with the score that evaluation returns",
        change=("seen",),
        source="https://github.com/facebookresearch/fairchem/pull/234",
    ),
    "matters_inside_fit": Cause(
        proof="between two steps of one fit it changes training, between two calls of fit it does not",
        repair="put back at the end of evaluation what it changes: was = model.training ... model.train(was)",
        change=("seen",),
        source="https://github.com/open-mmlab/mmaction2/issues/1781",
    ),
    "raises_before_first_step": Cause(
        proof="evaluate() raises on a fresh loop and not after optimizer steps",
        repair="make what it reads where the loop is built, if the project evaluates before it trains",
        change=("seen",),
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/7050",
    ),
}


COPIES = 12
"""Times the weights in float64 that are held at the peak, with an optimizer that keeps two moments."""


@check(
    needs={"run"},
    causes=CAUSES,
    rank=20,
    instrument="pytest_trainloop.checks.state.evaluation_is_pure.inside_fit:SeedsInFit",
    names="attribute",
)
def evaluation_is_pure(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.evaluation_is_pure.inside_fit import reseeding_inside
    from pytest_trainloop.checks.state.evaluation_is_pure.judgement import Judgement
    from pytest_trainloop.runs.room import require_room

    if "evaluate" not in evidence.offers:
        if inside := reseeding_inside(evidence):
            yield _reseeds(inside)
        else:
            given = (
                "TrainLoop.evaluate is not given" if evidence.repeatable else "watching once does not offer evaluate"
            )
            raise CannotDecide(
                f"{given}: an evaluation inside fit cannot be taken out, so only dropout and reseeding are looked at "
                "there",
                needs="evaluate=",
            )
        return
    require_room(evidence, COPIES, "it keeps copies of the whole training state at several moments")
    made = evidence.shared(Judgement.of)
    if made.reseeding is None and (inside := reseeding_inside(evidence)):
        yield _reseeds(inside)
    if made.raised is not None:
        yield _raised(made.raised)
        return
    if made.raised_early is not None:
        yield _raised(made.raised_early)
    for left in made.left:
        yield _left(left)
    if made.reseeding is not None:
        yield _reseeds(made.reseeding)
    for dropout in made.dropout:
        yield _dropout(dropout)
    if made.skip and not made.left:
        raise CannotDecide(made.skip)


_SUMMARIES = {
    "evaluation_trains": "evaluate() makes {steps} and leaves {what} changed, and training goes on with them",
    "weights_left": "evaluate() leaves other values in {what}{holder}, and training goes on with them",
    "gradients_left": "evaluate() leaves gradients in {what}, and the next optimizer step uses them",
    "buffers_moved_by_evaluation": "evaluate() changes {what}, which training computes with",
    "mode_left": "evaluate() leaves {what} in {value} mode, and training goes on in it",
    "state_left": "evaluate() changes {what}, and training goes on with that",
    "switch_left": "evaluate() leaves {what} at {value}, and training goes on under it",
    "data_changed": "evaluate() changes {what} in place, which training is given",
    "inference_tensor_kept": "evaluate() keeps {what}, made in inference mode, and training raises on it",
    "norm_statistics_moved": "evaluate() changes {what}, on which training does not depend",
    "hooks_left": "evaluate() leaves one more hook on {what} each time",
    "feedback": "evaluate() changes {what}, and training goes on with that",
    "matters_inside_fit": "evaluate() leaves {what} {how}, which matters where it is called between two steps of fit",
    "raises_before_first_step": "evaluate() raises before the first optimizer step, and not after some",
}


def _left(left: Left) -> Finding:
    summary = _SUMMARIES[left.cause].format(
        what=some(left.paths) if left.paths else left.component,
        steps=count(left.steps, "optimizer step"),
        value=left.after,
        how=f"in {left.after} mode" if left.component == "modes" else "changed",
        holder=f", those of {left.holder}" if left.holder else "",
    )
    return Finding(
        cause=left.cause,
        level=left.level,
        summary=summary,
        measured=_measured(left),
        shown_by=left.shown_by,
        culprits=left.paths[:MOST_CULPRITS] or (left.component,),
        where=left.where,
        repair=_repair(left),
    )


def _repair(left: Left) -> str:
    """For what this evaluation does; empty for the cause's own."""
    if left.cause == "mode_left" and left.after == "training":
        return _FROZEN_PARTS
    return _ATTACK if left.cause == "gradients_left" and "backward(" in left.where else ""


_ATTACK = (
    "torch.autograd.grad(loss, x) in place of backward(), where a gradient with respect to x is needed: it writes no "
    ".grad; else leave backward() out, and put with torch.no_grad(): around evaluation"
)


_FROZEN_PARTS = (
    "train() switches the whole model: call eval() on the parts that are frozen after it, or override train() in the "
    "model so that they stay in evaluation mode"
)


def _measured(left: Left) -> str:
    changed = ""
    if left.before and left.after and left.cause == "mode_left":
        changed = f"{left.paths[0]} was in {left.before} mode before evaluate() and is in {left.after} mode after it"
    elif left.before and left.after:
        changed = f"{left.paths[0]} was {left.before} before evaluate() and is {left.after} after it"
    if left.raised:
        effect = f"fit then raises {left.raised}"
    elif left.weight:
        steps = count(left.rounds, "further optimizer step")
        effect = (
            f"after {steps} {left.weight} differs by {share(left.change)} of its largest entry from the run without "
            "evaluate()"
        )
    else:
        effect = ""
    return "; ".join(filter(None, (changed, effect))) or left.measured


def _reseeds(found: Reseeding) -> Finding:
    every = "a constant" if found.constant else "a number of its own"
    return Finding(
        cause="reseeds",
        level=found.level,
        summary=f"evaluation seeds {found.which} with {every}, and training goes on from there",
        measured=found.measured,
        shown_by=found.shown_by,
        culprits=(found.call,),
        where=found.where,
    )


def _dropout(found: ActiveDropout) -> Finding:
    return Finding(
        cause="dropout_stays_on",
        level=found.level,
        summary=f"{found.summary}, in evaluate()",
        measured=found.measured,
        shown_by=found.shown_by,
        culprits=(found.module,),
        where=str(found.place),
        repair=found.repair,
    )


def _raised(raised: Raised) -> Finding:
    """The exception with the user's traceback."""
    early = raised.before_first_step
    return Finding(
        cause="raises_before_first_step" if early else "evaluation_raised",
        level="advice" if early else "fault",
        summary=(f"evaluate raised {raised.error.summary}" + (", before the first optimizer step" if early else "")),
        measured="on a fresh loop" if early else f"after {count(raised.steps, 'optimizer step')}, which raised nothing",
        shown_by=raised.error.traceback,
        culprits=("evaluate()",),
        where=raised.where,
    )
