"""Evaluation leaves training as it was: with it and without it the same weights come out.

What it does
    It runs ``fit`` twice on one loop, three optimizer steps each: once with ``evaluate()`` between the two calls, once
    without. It compares the weights at the end. A third run calls ``evaluate()`` before the first step.

    Evaluations that ``fit`` calls itself are taken out: two runs of ``fit`` are compared, one of which undoes what they
    change.

Why is this bad?
    An evaluation may leave averaged weights in the model, gradients in ``.grad``, batch norms in evaluation mode,
    gradients switched off or a constant seed. All later training changes, and nothing raises. How often one validates
    then decides what is learned.

How it decides
    1. Both runs get the same batches and seeds after the cut. The weights that the second call of ``fit`` moves must
       agree up to rounding; bit for bit if a weight comes back rounded to a lower precision. What training does not use
       may change.
    2. If they differ, everything that differs after ``evaluate()`` is put back. If that restores training, all but one
       of them are put back, one after another. What alone makes training differ is the cause.
    3. If evaluation changes modes, gradients or switches, ``evaluate()`` is also called between two steps of one
       ``fit``. A difference only there is advice. A mode that ``fit`` sets again after steps is silent.
    4. If evaluation changes a buffer that is no statistic of a norm, both runs are repeated with 18 steps before it and
       6 after.
    5. Inside ``fit``, an evaluation is a project function whose forward passes have gradients off and evaluation mode
       on, without backward passes or steps. As it returns, everything that it changed is put back, except generators.
       If training then differs, one kind of change at a time is left. Silent are samples, pseudo labels and scores that
       steer: other weights inside the calls show that.
    6. With the weights and the seed of the first run, ``evaluate()`` is called a second time. It must have its data
       again, and return no sum or mean of both calls.

    | what alone makes training differ | cause | advice if |
    |---|---|---|
    | weights (an optimizer stepped inside) | ``weights_left`` (``evaluation_trains``) |  |
    | gradients; inside fit: cleared between backward and step | ``gradients_left``, ``window_cleared`` |  |
    | buffers; modes | ``buffers_moved_by_evaluation``, ``mode_left`` |  |
    | data; a switch of the process; other state | ``data_changed``, ``switch_left``, ``state_left`` |  |
    | what ``fit`` never changes, set by a score or each call | ``feedback`` | always |
    | an iterator is used up, or a metric is not reset, at the second call | ``state_left`` |  |
    | training raises, and an inference tensor was kept | ``inference_tensor_kept`` |  |
    | two random states train differently, and equally after it | ``reseeds`` | new seeds each time; nothing draws |
    | dropout acts in evaluation mode | ``dropout_stays_on`` | ``training=`` written out; samples |
    | nothing, but norm statistics or more hooks remain | ``norm_statistics_moved``, ``hooks_left`` | always |
    | ``evaluate()`` raises after steps; before the first only | ``evaluation_raised``, ``raises_before_first_step`` |
      before the first |
    | anything, and only between two steps of one ``fit`` | ``matters_inside_fit`` | always |

When it is skipped
    It skips a difference that nothing restores, and an evaluation that needs a missing file.

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
    An evaluation that changes training in its second call only (restoring best weights) is not seen. Streams that
    evaluation and training share cannot be put back: a skip. A ``fit`` that trains in its first call only is judged
    between two of its steps.

    An evaluation inside ``fit`` that switches no module to evaluation mode is not taken out. Of one that is written out
    in a function that trains, its forward passes are taken out. Modes that an evaluation inside ``fit`` leaves are
    found by ``train_mode``. With the knob ``accumulate`` the runs have windows of 4.

    Optimizer steps of the loop itself: 15 where nothing is found, 6 of them shared with ``resume_equivalence``. It
    makes 12 more where evaluation casts weights or sets switches, leaves gradients or modes, or runs inside ``fit``; 48
    more where it changes buffers. Where something is found: 6 to put all back, 6 for each thing that differs and 3 for
    its line. That is 21 to 50, in trainers of libraries up to 100. Evaluations that ``fit`` calls: 18, and 45 to 70
    where they change training.

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
    from pytest_trainloop.runs.memory_budget import require_room

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
