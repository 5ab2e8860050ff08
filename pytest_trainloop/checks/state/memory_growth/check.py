"""Memory does not grow with the number of steps.

What it does
    It marks the nodes of every graph that is backpropagated in the first steps of the watched run. After nine steps it
    looks which of them are alive.

Why is this bad?
    A loss that is added up without ``item()`` or ``detach()`` holds the graph of every step. Memory grows by a little
    each step, and the run ends with "out of memory" after hours. A hidden state that is not detached between batches
    makes each backward pass longer than the one before, or raises in the second.

How it decides
    1. A graph that has been backpropagated is freed: nothing can go through it again, so nobody keeps it on purpose. It
       must be gone three steps later.
    2. A mark lies in the node itself and goes with it. Nothing is measured, and no bound is guessed
       (docs/how-it-decides.md#graphs-that-stay).
    3. If the graphs of all steps but the last three are alive, the loop runs for 36 steps. If those of the first steps
       are still alive then, the tensors that Python holds show why.
    4. Graphs that are never backpropagated (an episode under way) carry no mark. Lists that are emptied, windows, the
       output of the last step, and cycles that Python's collector finds pass.
    5. It is advice if a deque with ``maxlen`` holds them, if every pass retained them and they can still be used, or if
       the run ended before step 36.

    | what reaches the graphs                                        | cause                   |
    |----------------------------------------------------------------|-------------------------|
    | one tensor reaches all of them                                 | ``running_sum``         |
    | as many tensors as steps, in one container                     | ``kept_tensors``        |
    | the backward pass of each step went through all earlier graphs | ``carried_graph``       |
    | nothing that Python can look into                              | ``held_outside_python`` |

When it is skipped
    It skips a loop with fewer than six optimizer steps.

Faulty
    >>> total = 0.0
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss = F.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     total += loss

Fixed
    >>> total = 0.0
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss = F.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     total += loss.item()

Known limits
    Only graphs that were backpropagated are looked at. Tensors without a history that pile up (outputs for a metric, a
    replay buffer) are not. Nor is an average of weights that is made outside ``torch.no_grad()``, whose graph no pass
    goes through. Fewer than six optimizer steps are a skip. What is kept from one call of ``fit`` to the next is not
    seen.

    Where nothing is kept no step is made for this check, or nine where the watched run made fewer. Where graphs are
    kept, it makes 36 steps and takes about two seconds for the search through Python's objects.

References
    https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.state.memory_growth.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.core.registry import check
from pytest_trainloop.core.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

INSTRUMENT = "pytest_trainloop.checks.state.memory_growth.growth:Growth"


@check(needs={"fit"}, causes=CAUSES, rank=50, steps=1, instrument=INSTRUMENT, names="attribute")
def memory_growth(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.memory_growth.growth import Growth, further_record

    record = further_record(evidence)
    if record.refused is not None and (record.raised is not None or not evidence.repeatable):
        yield from evidence.shared(Growth.of).refused(record.refused)
        return
    if record.graphs is None:
        if not record.autograd_passes():
            raise DoesNotApply("no backward pass of autograd was seen")
        if record.raised is not None:
            raise CannotDecide(f"fit raised {record.raised.summary} before six optimizer steps")
        raise CannotDecide(
            f"{count(record.rounds, 'optimizer step')} happened; six are needed to distinguish growth from what one "
            "step leaves to the next"
        )
    if record.graphs.all_kept:
        yield from evidence.shared(Growth.of).kept()
