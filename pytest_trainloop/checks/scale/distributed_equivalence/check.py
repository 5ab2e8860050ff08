"""Several ranks give the gradients, and keep the weights, that one process gives with all of their rows.

What it does
    It calls the function with its knob ``ranks`` at 2, in two processes of torch.distributed. It compares the gradient
    that each rank's first step reads with that of one process. Both get the same rows, in float64, without dropout,
    from the same weights; each rank gets an equal share.

    Then it runs the ranks over the loop's own batches, each under a seed of its own, and looks at their rows, weights,
    buffers, draws and files.

Why is this bad?
    A model that is never synchronised trains as many models as there are ranks, and the one of rank 0 is saved. A
    gradient that is summed where it is to be averaged trains at N times the learning rate. Both look like training.

How it decides
    1. It calls the function with ``ranks=2`` over the loop's own batches, each rank under its own seed. A rank that
       waits in a collective which another never enters is ``one_rank_waits``. What torch raises for parameters without
       a gradient is ``unused_parameters``, or ``parameters_not_in_wrapper`` if they came after the wrapper.
    2. It compares the gradients of equal shares with those of one process (``ranks=1``), in float64 to 1e3 eps. With
       ``accumulate``, it compares windows of micro-batches too. Loops with equal updates pass. So do loops that share
       out the model or cut whole batches, if they agree on all rows.
    3. Where gradients differ, g_r is the gradient of rank r's rows in one process. Least squares write both gradients
       as sums of w_r g_r (docs/how-it-decides.md#accumulation-as-weights). The weights give the cause.
    4. Of the first step it compares weights, rows, draws, buffers and files. Samplers that cut different orders
       (``rows_left_out``) and a file that all ranks write (``written_by_every_rank``) are faults. These are advice:
       ``same_draws_on_every_rank``, ``batch_norm_per_rank``, ``synchronised_every_micro_batch``, and what disappears
       under one seed.
    5. Under torchrun it watches the script's ranks and runs nothing again. Weights must be equal if a
       DistributedDataParallel holds them, or if all ranks read equal gradients. Ranks that share out rows and read
       their own gradients are ``never_synchronised``: advice if a file could average weights.
    6. Where rows interact, the same direction with a different factor is advice.

    | weights, if one process has [.5, .5]; or what is seen | cause | advice if |
    |---|---|---|
    | [1, 0] on rank 0, [0, 1] on rank 1 (or all read one rank's) | ``never_synchronised`` | ``ranks`` is not read |
    | the same, and the wrapper is not called at these steps | ``wrapper_bypassed`` |  |
    | the same, for some parameters only | ``parameters_not_in_wrapper`` | in a script |
    | only the last micro-batch is the rank's own | ``last_micro_batch_not_synchronised`` |  |
    | [1, 1] | ``summed_over_ranks`` | no power of the ranks |
    | [.25, .25] | ``divided_twice`` | equal on all rows |
    | equal; one process weighs by valid targets, [.52, .48] | ``mean_of_means`` | targets do not fit |
    | 1 / length of each g_r, or other norms in clips | ``norm_of_one_shard`` | script: nothing cut |
    | the losses agree, rows interact, values were gathered | ``gathered_without_gradient`` |  |
    | losses and gradients are equal on both ranks, bit for bit | ``same_rows_on_every_rank`` | only under one seed |
    | weights differ before the first step | ``start_differs`` | only under other seeds |
    | weights part later | ``weights_drift`` | buffers only; under other seeds |

When it is skipped
    It skips a different direction where rows interact, ranks that raise on shares, and weights averaged after steps.

Faulty
    >>> if ranks > 1:
    ...     model = nn.parallel.DistributedDataParallel(model)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     logits = model.module(x) if ranks > 1 else model(x)
    ...     F.cross_entropy(logits, y).backward()
    ...     optimizer.step()

Fixed
    >>> if ranks > 1:
    ...     model = nn.parallel.DistributedDataParallel(model)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    Two ranks on one machine, on the CPU and with gloo. What depends on the number of machines, on NCCL or on GPUs is
    not seen (``SyncBatchNorm`` raises on a CPU: the check is skipped). Batch norms use their running statistics in the
    comparison. Shares have equal numbers of rows.

    The own batches are run for 8 steps: weights that are averaged less often than that are taken for weights that part.
    Whether rows are shared out is seen of a DataLoader, given as ``batches=``, and of data that ``fit`` makes. Of a
    list or a function each rank gets every Nth batch.

    Of a script the weights are compared before the first 40 steps, the gradients in the first 12. Where rank 0 makes no
    optimizer step, or a rank is killed, nothing is reported of the ranks.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    https://huggingface.co/blog/gradient_accumulation (mean of means over ranks)
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.scale.distributed_equivalence.causes import CAUSES, RANKS
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

AT_THE_STEP = ("never_synchronised", "summed_over_ranks", "weights_drift")
"""Causes that show where the optimizer steps; the others at the backward pass."""

CALLS = {
    **dict.fromkeys(AT_THE_STEP, "optimizer.step()"),
    "norm_of_one_shard": "clip_grad_norm_()",
    "same_draws_on_every_rank": "manual_seed()",
    "same_rows_on_every_rank": "batches",
}
"""What is named where nothing of the project's own is: a call that others would find too."""


@check(needs={"run"}, causes=CAUSES, rank=10)
def distributed_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.instruments.tracing.statements import call_of_model

    for finding in _found(evidence):
        names = finding.culprits or (CALLS.get(finding.cause, "loss.backward()"),)
        change = call_of_model(evidence.run()) if finding.cause == "wrapper_bypassed" else ""
        where = finding.where or _line(evidence, finding.cause)
        yield replace(finding, culprits=names, where=where, change=finding.change or change)


def _found(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.scale.distributed_equivalence.script_ranks import of_script
    from pytest_trainloop.checks.scale.distributed_equivalence.script_runs import watched_launch

    if not evidence.repeatable and (launch := evidence.shared(watched_launch)) is not None:
        yield from of_script(launch)
        return
    _require_knob(evidence)
    seen = evidence.run()
    if seen.raised is not None:
        raise CannotDecide(f"fit raised {seen.raised.summary} in one process")
    if not seen.steps:
        raise CannotDecide("the loop makes no optimizer step in one process")
    yield from _findings(evidence)


def _findings(evidence: Evidence) -> Iterator[Finding]:
    """In the order in which one explains the next. Raises ``CannotDecide`` where nothing was found and the gradients
    could not be compared."""
    from pytest_trainloop.checks.scale.distributed_equivalence.gradients import of_gradients
    from pytest_trainloop.checks.scale.distributed_equivalence.own_batches import OwnBatches

    own = evidence.shared(OwnBatches)
    if ended := own.ending():
        yield ended
        return
    undecided, finding = None, None
    try:
        finding = of_gradients(evidence, RANKS, own.results)
    except CannotDecide as reason:
        undecided = reason
    if finding is not None:
        yield finding
    named = finding is not None and finding.level == "fault"
    unsynchronised = finding is not None and finding.cause == "never_synchronised"  # also where the knob is not read
    others = list(own.rules(parts=not named and not unsynchronised))
    if named or any(other.level == "fault" for other in others):  # which says more of the same
        others = [other for other in others if other.level == "fault" or other.cause != "start_differs"]
    yield from others
    if undecided is not None and not any(other.level == "fault" for other in others):
        raise undecided


def _line(evidence: Evidence, cause: str) -> str:
    """Where the loop steps or backpropagates in one process; where it calls the model, if a trainer does both."""
    from pytest_trainloop.instruments.gradients import compare

    record = evidence.run()
    optimizer = next(iter(compare.optimizers(record)), 0)
    backward = compare.first_backward(record, optimizer)
    if backward is not None and (cause == "wrapper_bypassed" or compare.made_by_library(backward)):
        return compare.line_of_forward(record, backward) or str(backward.place)
    if backward is None or cause in AT_THE_STEP:
        return compare.step_place(record, optimizer)
    return str(backward.place)


def _require_knob(evidence: Evidence) -> None:
    name = evidence.knobs.get("ranks")
    if name is None:
        raise DoesNotApply(
            "the function has no knob ranks=; where the project trains on several, give it ranks=1 and build the loop "
            "for so many processes"
        )
    if not evidence.repeatable:
        raise CannotDecide("a single run was watched: several ranks need the function that builds the loop")
    default = inspect.signature(evidence.make).parameters[name].default
    if default not in (1, None):
        raise CannotDecide(
            f"the default of {name} is {default!r}, and one process is what ranks are compared with: give {name}=1",
            needs="ranks=1",
        )
