"""Training runs in training mode, evaluation in evaluation mode.

What it does
    It notes the mode of every module in every forward pass of the run, who switches it, and whether gradients are on.
    Where ``evaluate`` is given it is called once after a short run.

Why is this bad?
    Under ``eval()`` dropout does nothing and batch norms use statistics that never learn; ``from_pretrained`` hands out
    models in that mode. A validation that leaves the mode on changes all training after it. A validation in training
    mode measures noise and writes the validation data into the batch norms' statistics.

How it decides
    A training pass (gradients on, of a model whose parameters are stepped) with modules in evaluation mode is a fault
    where the mode makes a difference: with those modules switched, the loop backpropagates something else. Norms that
    are kept in evaluation mode while their model trains are meant, and so is any part that is switched by a call of its
    own, or by a ``train()`` that the model defines, with no evaluation in between, or that runs in both modes for one
    loss. A model that makes its own training data in evaluation mode and learns from them so (rollouts) is advice.
    An evaluation inside ``fit`` is a forward pass in training mode that no backward pass follows and of which a number
    is made, but none that trains: with other results in its place the loop backpropagates the same. Rollouts,
    pseudo-labels, teachers and refreshed statistics are none. Results taken out of torch row by row count where the
    same inputs are looked at each time. In evaluation mode the first result must be another one: with the same values
    nothing is said, and with another structure (losses in training mode, boxes in the other), or where neither dropout
    nor a norm of torch's was at work, it is advice. The same inputs several times in a row are samples, for which
    dropout is wanted.

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
    exactly once with each step, or looks at the batch that was just trained on, is advice: a look at how training goes.
    ``F.dropout`` with ``training=True`` written out has no mode that could be watched.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.wiring.train_mode.evaluations import Evaluation, Verdict
    from pytest_trainloop.checks.wiring.train_mode.modes import InEval
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch",)

CAUSES = {
    "trained_in_eval": "training passes run in evaluation mode from the start, and in training mode the loss differs",
    "eval_left_on": "modules that trained in training mode run in evaluation mode after an evaluation",
    "evaluated_in_train": "an evaluation runs in training mode with modules that act differently there",
}


@check(needs={"fit"}, causes=CAUSES, rank=40)
def train_mode(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.train_mode.phases import Phases

    phases = Phases(evidence)
    found, change, level = phases.in_eval()
    if found is not None and change > 0.0:
        yield _trained(found, change, level)
    for evaluation, level in phases.evaluations():
        yield _evaluated(evaluation, level)
    if "evaluate" in evidence.offers:
        modules, place = phases.evaluate_in_training_mode()
        if modules:
            yield _evaluate_given(modules, place)


def _modules(paths: Sequence[str]) -> str:
    return f"module{'s' if len(paths) > 1 else ''} {some(paths)}"


def _trained(found: InEval, change: float, level: Verdict) -> Finding:
    left = found.cause == "eval_left_on"
    what = "the whole model" if found.whole else _modules(found.modules)
    since = f"from optimizer step {found.step + 1} on" if left else "from the first step on"
    return Finding(
        cause=found.cause,
        level=level,
        summary=(
            f"{what} {'is' if found.whole else be(found.modules)} trained in evaluation mode {since}"
            + (": an evaluation left it so" if left else "")
        ),
        measured=f"{len(found.modules)} modules that act by mode; in training mode the loss differs by {change:.1e}",
        shown_by=(
            "they ran in training mode before, an evaluation switched them, and nothing switched them back"
            if left
            else "this call switches them, and nothing switches them back before the training forward pass"
            if found.call
            else "no call of train() reaches them before the training forward pass"
        ),
        culprits=found.modules[:12],
        where=found.call or found.forward,
        repair=(
            "call train() again when the evaluation is over, on the module that eval() was called on"
            if left
            else "take this eval() away, or call train() after it"
            if found.call
            else "call model.train() before the training loop (from_pretrained returns models in evaluation mode)"
        ),
        explains=CONSEQUENCES,
    )


def _evaluated(found: Evaluation, level: Verdict) -> Finding:
    return Finding(
        cause="evaluated_in_train",
        level=level,
        summary=f"an evaluation inside fit runs in training mode, with {_modules(found.modules)} active",
        measured=f"{found.calls} forward passes in training mode that train nothing, beside {found.steps} steps",
        shown_by="a score is made of them, and with other results in their place the loop backpropagates the same",
        culprits=found.modules[:12],
        where=found.place,
        repair="model.eval() before the evaluation, model.train() after it",
        explains=CONSEQUENCES,
    )


def _evaluate_given(modules: tuple[str, ...], place: str) -> Finding:
    return Finding(
        cause="evaluated_in_train",
        summary=f"evaluate runs in training mode, with {_modules(modules)} active",
        measured=f"{len(modules)} modules that act by mode were in training mode in a forward pass of evaluate()",
        shown_by="seen in the forward pass itself, after a short run of fit",
        culprits=modules[:12],
        where=place,
        repair="model.eval() before the evaluation, model.train() after it",
        explains=CONSEQUENCES,
    )
