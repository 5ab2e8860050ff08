"""Evaluation leaves training as it was: with it and without it the same weights come out.

What it does
    It runs ``fit`` twice on one loop, three optimizer steps each: once with ``evaluate()`` between the two calls, once
    without. It compares the weights at the end. A third run calls ``evaluate()`` before the first step. Evaluations
    that ``fit`` calls itself are taken out: two runs of ``fit`` are compared, one of which undoes what they change.

Why is this bad?
    An evaluation may leave averaged weights in the model, gradients in ``.grad``, batch norms in evaluation mode,
    gradients switched off or a constant seed. All later training changes, and nothing raises. How often one validates
    then decides what is learned.

How it decides
    Evaluation may change what training does not use: histories, best weights, caches, generators that it draws from. So
    the question is not what changed, but whether training comes out differently. Both runs have the same batches and
    the same seeds after the cut. The check compares the weights that the second call of ``fit`` moves without
    evaluation, up to rounding; bit for bit where a weight comes back rounded to a lower precision.
    Where they differ, everything that differs right after ``evaluate()`` is put back: weights, gradients, buffers,
    modes, attributes, optimizer state, data, switches of the process. If that restores training, all but one of them
    are put back, one after another. What makes training differ alone is the cause. If nothing restores it, the check is
    skipped.
    Reseeding: where ``evaluate()`` leaves a global generator in one state, whatever it was before, runs with two
    random states at the cut are compared. It is a fault where they train differently without evaluation and equally
    with it. A seed of its own each time is advice; evaluation that only draws is nothing.
    Dropout that acts in evaluation mode is a fault where its call leaves ``training=`` to the default or has no such
    argument. It is advice where it is written out, or the same inputs come several times (samples).
    Feedback: evaluation steers training on purpose where it sets what ``fit`` itself never changes, by the model's
    score or with each call (a rate on a plateau, a curriculum, weights of classes): advice.
    Inside fit: where evaluation changes modes, gradients or switches, and ``fit`` sets them again as it begins,
    ``evaluate()`` is also called between two steps of one ``fit``. What differs only there is advice, but not a mode
    that ``fit`` sets again later, at the start of an epoch.
    Later: where evaluation changes a buffer that is no statistic of a norm, and training is the same after three steps,
    both runs are made again with 18 steps before ``evaluate()`` and 6 after it.
    Evaluations that ``fit`` calls: functions of the project in which every forward pass has gradients off and
    evaluation mode on, of a model that trains elsewhere, with no backward pass and no step. Where there is none, such
    forward passes are looked at one by one. As each returns, everything that it changed is put back, but for
    generators; what it returns stays. Where training is another, one kind of change at a time is left.
    Three things are a fault: a gradient that is cleared between a backward pass and its step, in the middle of a pass
    over the batches; a buffer or an attribute of a module that a forward pass changes, in a function that training
    calls too; weights of an average that are put in for these forward passes and stay.
    Nothing is said where training depends on what the model computes there: samples, rollouts, pseudo labels, a score
    that steers. Other weights inside the calls show that. With the knob ``accumulate`` the runs have windows of 4.

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
    first call only is judged between two of its steps. An evaluation inside ``fit`` that switches no module to
    evaluation mode is not taken out; of one that is written out in a function that trains, its forward passes are.
    Modes that an evaluation inside ``fit`` leaves are found by ``train_mode``.
    Optimizer steps of the loop itself: 15 where nothing is found, 6 of them shared with ``resume_equivalence``; 12 more
    where evaluation casts weights or sets switches, leaves gradients or modes, or runs inside ``fit``; 48 more where it
    changes buffers. Where something is found: 6 to put all back, 6 for each thing that differs and 3 for its line: 21
    to 50, in trainers of libraries up to 100. Evaluations that ``fit`` calls: 18, and 45 to 70 where they change
    training.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.state_dict
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.state.evaluation_is_pure.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

INSTRUMENT = "pytest_trainloop.checks.state.evaluation_is_pure.seeds:SeedsInFit"


@check(needs={"run"}, causes=CAUSES, rank=20, steps=50, instrument=INSTRUMENT, names="attribute")
def evaluation_is_pure(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.evaluation_is_pure.inside_fit import COPIES, STORED, InsideFit
    from pytest_trainloop.checks.state.evaluation_is_pure.judgement import Judgement
    from pytest_trainloop.checks.state.evaluation_is_pure.seeds import seeded_inside
    from pytest_trainloop.runs.room import require_room

    if "evaluate" not in evidence.offers:
        yield from (seeded := seeded_inside(evidence))
        yield from (inside := evidence.shared(InsideFit.of)).findings
        if seeded or not inside.undecided:
            return
        if evidence.repeatable:
            raise CannotDecide(f"TrainLoop.evaluate is not given, and {inside.undecided}", needs="evaluate=")
        raise CannotDecide(
            "watching once does not offer evaluate: an evaluation inside fit cannot be taken out there, so only "
            "dropout and reseeding are looked at",
            needs="evaluate=",
        )
    require_room(evidence, COPIES, "it keeps copies of the whole training state", stored=STORED)
    judged = evidence.shared(Judgement.of)
    if all(finding.cause != "reseeds" for finding in judged.findings):
        yield from seeded_inside(evidence)
    yield from judged.findings
    if all(finding.level != "fault" for finding in judged.findings):
        yield from evidence.shared(InsideFit.of).findings
    if judged.unresolved:
        raise CannotDecide(judged.unresolved)
