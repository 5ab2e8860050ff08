"""Several ranks give the gradients, and keep the weights, that one process gives with all of their rows.

What it does
    It calls the function with its knob ``ranks`` at 2, in two processes of torch.distributed, and compares the gradient
    that each rank's first step reads with that of one process: on equal shares of the same rows, in float64, without
    dropout, from the same weights. Then it runs the ranks over the loop's own batches, each under a seed of its own,
    and looks at their rows, weights, buffers, draws and files.

Why is this bad?
    A model that is never synchronised trains as many models as there are ranks, and the one of rank 0 is saved. A
    gradient that is summed where it is to be averaged trains at N times the learning rate. Both look like training.

How it decides
    The knob is a promise: ``ranks=N`` trains as one process on the rows of all. The reference is the loop itself at
    ``ranks=1``. In float64 both gradients agree to rounding (1e3 machine epsilons), whatever reduces them: wrappers,
    sharded optimizers, collectives of the project's own. Gradients of shards are put together from all ranks.
    Where they do not agree, the check takes g_r, the gradient of the rows of rank r alone in one process, and writes
    both as sums of w_r g_r by least squares. The weights are the diagnosis, with one process at [.5, .5]: [1, 0] on
    rank 0 and [0, 1] on rank 1: never synchronised (the wrapper by-passed, where there is one that nobody calls; not in
    the wrapper, where some parameters read so and others do not). [1, 1]: summed over ranks. [.25, .25]: divided twice.
    [.5, .5] where one process has [.52, .48] by its valid targets: a mean of means. One over the lengths of the g_r:
    clipped before it was reduced. Norms by which ranks clip are compared with that of one process as well, so that a
    clip shows which finds nothing to cut on these rows.
    With a knob ``accumulate`` too, or where a step takes several batches, each rank gets windows of micro-batches. A
    last micro-batch that only its own rank reads is a ``no_sync`` turned round; gradients that are exchanged in each of
    them are advice.
    Of ranks that share out the model, the parameters that all hold whole are compared with all rows on every rank: with
    one gradient before the clip and another on each rank after it, each clips by the norm of its own part. Where some
    steps call the wrapper and others do not, the ranks read different gradients at just those without a call.
    A loop whose gradients differ and whose updates do not is right: its rate is scaled to match, or its optimizer
    reduces. So is one that cuts whole batches by itself, and one whose ranks share out the model: with all rows on
    every rank it agrees. Where rows interact (a contrastive loss) a gradient that agrees is right, one in the direction
    of the single process is advice with its factor, and of any other nothing is said.
    A rank that waits in a collective which another never enters is found from the calls that each rank makes, without a
    clock; so are tensors of other sizes, and lists that have no room for what a rank gives. What torch raises for
    parameters without a gradient is named with these. Over the loop's own batches the ranks have different seeds. The
    same losses and the same gradients on all, bit for bit, are the same rows. Weights that differ before the first step
    are a fault, and advice where the seeds alone make the difference: then those of a run under one seed are followed.
    Weights that part later are a fault where an optimizer steps them; what parts first is named: the rate, the number
    of steps, the gradient. Weights that come together after some steps are averaged on purpose. The same draws on all
    ranks, batch norms by rank, and buffers that part are advice.
    Of a script under torchrun every rank is watched, and nothing is run again. Weights are copies of each other where
    a DistributedDataParallel holds them, or all ranks read the same gradients of them in every step: these are at fault
    where they differ. Ranks that share out rows and read gradients of their own rows in every step are at fault if no
    file of the script names what could average weights later, else advised. So are weights whose gradients the ranks
    do not exchange, where they exchange others. The same rows are a fault where each wrapper is called with the same
    batches, another one in each step. Norms of clips that differ where all ranks then read the same gradient come
    before the reduction.

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
    Two ranks on one machine, on the CPU and with gloo: what depends on the number of machines, on NCCL or on GPUs is
    not seen (``SyncBatchNorm`` raises on a CPU: the check is skipped). Batch norms use their running statistics in the
    comparison. Shares have equal numbers of rows. The own batches are run for 8 steps: weights that are averaged less
    often than that are taken for weights that part. Whether rows are shared out is seen of a DataLoader, given as
    ``batches=``, and of data that ``fit`` makes; of a list or a function each rank gets every Nth batch. Of a
    script the weights are compared before the first 40 steps, the gradients in the first 12. Where rank 0 makes no
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
    for finding in _found(evidence):
        names = finding.culprits or (CALLS.get(finding.cause, "loss.backward()"),)
        yield replace(finding, culprits=names, where=finding.where or _line(evidence, finding.cause))


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
