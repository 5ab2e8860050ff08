"""Training runs in training mode, evaluation in evaluation mode.

What it does
    It records the mode of every module in every forward pass of the run, the calls that switch it, whether gradients
    are on, and dropout that acts in evaluation mode. Where ``evaluate`` is given it is called once after a short run.

Why is this bad?
    Under ``eval()`` dropout does nothing and batch norms use statistics that never learn; ``from_pretrained`` returns
    models in that mode. A validation that leaves the mode on changes all training after it. A validation in training
    mode measures noise and writes the validation data into the batch norms' statistics.

How it decides
    A training pass has gradients on, and its model's parameters are stepped. Modules in evaluation mode there are a
    fault where the mode makes a difference: with those modules switched, the loop backpropagates something else. Norms
    that stay in evaluation mode while their model trains are meant. So is any part that is switched by a call on that
    part alone, or by a ``train()`` that the model defines, with no evaluation in between, the rest of a model of which
    code puts parts back into training mode, and any part that runs in both modes for one loss. A model that makes its
    own training data in evaluation mode (rollouts) is advice.
    An evaluation inside ``fit`` is a forward pass in training mode that no backward pass follows. A number must be made
    of its result, but no loss that trains: with other results in its place the loop backpropagates the same. Rollouts,
    pseudo-labels, teachers and refreshed statistics are none. Results taken out of torch row by row count where the
    same inputs are evaluated each time. In evaluation mode the first result must be another one: with the same values
    nothing is said. It is advice where evaluation mode returns another structure (losses in training mode, boxes in the
    other), or where neither dropout nor a norm of torch's was active. The same inputs several times in a row are
    samples, for which dropout is wanted.

Faulty
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    ...     model.eval()
    ...     with torch.no_grad():
    ...         accuracy = (model(x).argmax(1) == y).float().mean()

Fixed
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    ...     model.eval()
    ...     with torch.no_grad():
    ...         accuracy = (model(x).argmax(1) == y).float().mean()
    ...     model.train()

Known limits
    A validation is seen where it comes within twelve steps, or at the end of an epoch of three batches. One that comes
    exactly once with each step, or uses the batch that was just trained on, is advice: it may show how training goes.
    Dropout that is written by hand (a mask of ``torch.rand``) is not seen in evaluation mode. Before Python 3.11,
    different calls of dropout on one line are advice.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.train_mode.modes import Judged
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.dropout_in_evaluation import ActiveDropout

CAUSES = {
    "trained_in_eval": Cause(
        proof="training passes run in evaluation mode from the start, and in training mode the loss differs",
        repair="call model.train() before the training loop (from_pretrained returns models in evaluation mode)",
        explains=("overfit_one_batch",),
        change=("seen",),
    ),
    "eval_left_on": Cause(
        proof="modules that trained in training mode run in evaluation mode after an evaluation",
        repair="model.train() after the evaluation that begins here, on the module that eval() was called on",
        explains=("overfit_one_batch",),
        change=("seen",),
    ),
    "evaluated_in_train": Cause(
        proof="an evaluation runs in training mode with modules that act differently there",
        repair="model.eval() before the evaluation, model.train() after it",
        explains=("overfit_one_batch",),
        change=("seen",),
        settle="evaluate= has the project's evaluation judged, as a promise",
    ),
    "dropout_stays_on": Cause(
        proof="dropout drops entries in a pass that trains nothing, in a module whose training is False",
        repair="F.dropout(x, p, training=self.training)",
        explains=("evaluation_is_pure:dropout_stays_on",),
        change=("seen",),
    ),
}

INSTRUMENT = "pytest_trainloop.tracing.dropout_in_evaluation:DropoutInEvaluation"


def _no_modes(evidence: Evidence) -> str:
    from pytest_trainloop.recording.events import Forward

    forwards = evidence.run().of(Forward)
    if not forwards:
        return "no module was called"
    acts = any(f.in_training or f.in_eval for f in forwards)
    return "" if acts else "no module of the model acts by mode (as dropout and batch norm do)"


@check(needs={"fit"}, causes=CAUSES, rank=40, steps=1, instrument=INSTRUMENT, absent=_no_modes)
def train_mode(evidence: Evidence) -> Iterator[Finding]:
    found = list(_inside_fit(evidence))
    yield from found
    if "evaluate" in evidence.offers:
        try:
            yield from _declared(evidence)
        except CannotDecide:
            if not found:
                raise


def _inside_fit(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.train_mode.evaluations import evaluations
    from pytest_trainloop.checks.wiring.train_mode.modes import in_eval
    from pytest_trainloop.checks.wiring.train_mode.phases import dropout_in_evaluation

    acting = dropout_in_evaluation(evidence)
    for dropout in acting:
        yield _stays_on(dropout)
    if acting and not evidence.repeatable:
        return  # what is left takes further runs
    judged = in_eval(evidence)
    if judged is not None and not judged.change <= 0.0:
        yield _trained(judged)
    for evaluation, level in evaluations(evidence):
        yield Finding(
            cause="evaluated_in_train",
            level=level,
            summary=f"an evaluation inside fit runs in training mode, with {_modules(evaluation.modules)} active",
            measured=(
                f"{evaluation.calls} forward passes in training mode that train nothing, next to {evaluation.steps} "
                "steps"
            ),
            shown_by=(
                "a number is made of their results, and with other results in their place the loop backpropagates the "
                "same"
            ),
            culprits=evaluation.modules[:12],
            where=str(evaluation.place),
        )


def _declared(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.train_mode.evaluations import declared_evaluation

    if declared := declared_evaluation(evidence):
        forward, level = declared
        modules = forward.in_training
        yield Finding(
            cause="evaluated_in_train",
            level=level,
            summary=f"evaluate runs in training mode, with {_modules(modules)} active",
            measured=f"{len(modules)} modules that act by mode were in training mode in a forward pass of evaluate()",
            shown_by="seen in the forward pass itself, after a short run of fit",
            culprits=modules[:12],
            where=str(forward.place),
        )


def _trained(judged: Judged) -> Finding:
    found, change, level = judged
    left = found.cause == "eval_left_on"
    what = "the whole model is" if found.whole else f"{_modules(found.modules)} {be(found.modules)}"
    since = f"from optimizer step {found.step + 1} on" if left else "from the first step on"
    if left:
        shown = "they ran in training mode before, an evaluation switched them, and nothing switched them back"
    elif found.call:
        shown = "this call switches them, and nothing switches them back before the training forward pass"
    else:
        shown = "no call of train() reaches them before the training forward pass"
    return Finding(
        cause=found.cause,
        level=level,
        summary=f"{what} trained in evaluation mode {since}" + (": an evaluation left it so" if left else ""),
        measured=f"{len(found.modules)} modules that act by mode"
        + ("" if math.isnan(change) else f"; in training mode the loss changes by {change:.1e}"),
        shown_by=shown,
        culprits=found.modules[:12],
        where=found.call or found.forward,
        repair="remove this eval(), or call train() after it" if found.call and not left else "",
    )


def _stays_on(dropout: ActiveDropout) -> Finding:
    return Finding(
        cause="dropout_stays_on",
        level=dropout.level,
        summary=f"{dropout.summary}, in an evaluation inside fit",
        measured=dropout.measured,
        shown_by=dropout.shown_by,
        culprits=(dropout.module,),
        where=str(dropout.place),
        repair=dropout.repair,
    )


def _modules(paths: Sequence[str]) -> str:
    return f"module{'s' if len(paths) > 1 else ''} {some(paths)}"
