"""Training runs in training mode, evaluation in evaluation mode.

What it does
    It records the mode of every module in every forward pass of the run, the calls that switch it, whether gradients
    are on, and dropout that acts in evaluation mode. Where ``evaluate`` is given it is called once after a short run.

Why is this bad?
    Under ``eval()`` dropout does nothing and batch norms use statistics that never learn; ``from_pretrained`` returns
    models in that mode. A validation that leaves the mode on changes all training after it. A validation in training
    mode measures noise and writes the validation data into the batch norms' statistics.

How it decides
    1. A training pass has gradients on, and its model's parameters are stepped. A module in evaluation mode there is a
       fault if switching it changes what the loop backpropagates.
    2. Silent are norms that stay in evaluation mode while their model trains, and a part that a call on that part
       switches. So are a part that the model's own ``train()`` switches without an evaluation in between, and a part
       that runs in both modes for one loss. If code puts parts back into training mode, the rest of the model is silent
       too. A model that makes its own training data in evaluation mode (rollouts) is advice.
    3. An evaluation inside ``fit`` is a forward pass in training mode that no backward pass follows. A number is made
       of its result, or results leave torch row by row for the same inputs each time.
    4. With other results in its place the loop must backpropagate the same. Otherwise it is a rollout, a pseudo-label
       or a teacher.
    5. In evaluation mode its first result must differ. Equal inputs several times in a row are samples: silent.

    | seen | cause | advice if |
    |---|---|---|
    | training passes run in evaluation mode from the start | ``trained_in_eval`` | rollouts |
    | they do so after an evaluation | ``eval_left_on`` |  |
    | an evaluation runs in training mode | ``evaluated_in_train`` | other structure; no dropout or norm |
    | dropout acts in evaluation mode | ``dropout_stays_on`` | ``training=`` written out; samples |

When it is skipped
    It skips a loop in which no module acts by mode.

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
    A validation is seen where it comes within twelve steps, or at the end of an epoch of three batches. A mode that is
    left at the end of ``fit`` counts where a loop in ``fit`` would go on: ``fit`` is called twice then. A validation
    that comes exactly once with each step, or uses the batch that was just trained on, is advice: it may show how
    training goes. Dropout that is written by hand (a mask of ``torch.rand``) is not seen in evaluation mode. Before
    Python 3.11, different calls of dropout on one line are advice.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.train_mode.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

INSTRUMENT = "pytest_trainloop.instruments.tracing.dropout_in_evaluation:DropoutInEvaluation"


def _no_modes(evidence: Evidence) -> str:
    from pytest_trainloop.recording.events import Forward

    forwards = evidence.run().of(Forward)
    if not forwards:
        return "no module was called"
    acts = any(f.in_training or f.in_eval for f in forwards)
    return "" if acts else "no module of the model acts by mode (as dropout and batch norm do)"


@check(needs={"fit"}, causes=CAUSES, rank=40, steps=5, instrument=INSTRUMENT, absent=_no_modes)
def train_mode(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.train_mode import evaluations, modes

    inside = list(evaluations.dropout_stays_on(evidence))
    if not inside or evidence.repeatable:  # what is left takes further runs
        inside += modes.trained_in_evaluation_mode(evidence)
        inside += evaluations.evaluated_in_training_mode(evidence)
    yield from inside
    if "evaluate" in evidence.offers:
        try:
            yield from evaluations.declared_evaluation(evidence)
        except CannotDecide:
            if not inside:
                raise
